"""Texts of the help pages: examples of every verb, and one line per flag of the config dataclasses."""

from collections.abc import Mapping
from types import MappingProxyType


def _examples(*lines: str) -> str:
    # A blank line between them keeps each example on its own line.
    return "\n\n".join(("[bold]Examples[/bold]", *lines))


EXAMPLES: Mapping[str, str] = MappingProxyType(
    {
        "peagle": _examples(
            'peagle generate smollm2-135m --prompt "Name three rivers."',
            "peagle chat smollm2-135m",
            "peagle serve smollm2-135m",
            "peagle bench sweep smollm2-135m --out sweep-me.json",
        ),
        "generate": _examples(
            'peagle generate smollm2-135m --prompt "Name three rivers."',
            "peagle generate smollm2-135m --prompts-file questions.jsonl --json",
            "peagle generate org/model --head my-head --num-speculative-tokens 7 --prompt Hi",
            "peagle generate model.gguf --no-speculation --temperature 0.7 --seed 1 --prompt Hi",
        ),
        "chat": _examples(
            "peagle chat smollm2-135m",
            "peagle chat org/model --head my-head --num-speculative-tokens auto --max-num-seqs 1",
        ),
        "self-prompts": _examples(
            "peagle self-prompts smollm2-135m --out self.jsonl --count 14000",
            "peagle self-prompts org/model --out self.jsonl --count 2000 --temperature 0.8 --seed 1",
        ),
        "prepare": _examples(
            "peagle prepare org/model --prompts prompts.jsonl --out data/model",
            "peagle prepare org/model --prompts prompts.jsonl --prompts self.jsonl --out data/model",
            "peagle prepare smollm2-135m --prompts prompts.jsonl --out data/smollm2 --temperatures 0,0.7",
        ),
        "extract": _examples(
            "peagle extract org/model --data data/model --out features/model",
            "peagle extract org/model --data data/model --out features/model --shard-gib 4 --yes",
        ),
        "train": _examples(
            "peagle train org/model --data data/model --out runs/model",
            "peagle train smollm2-135m --data data/smollm2 --out runs/tiny --num-layers 2 --max-seconds 600",
            "peagle train --recipe recipes/smollm2-135m.toml --data data/smollm2 --out runs/again --logger tensorboard",
            "peagle train org/model --data data/model --features features/model --out runs/model",
        ),
        "inspect": _examples("peagle inspect heads/smollm2-135m-instruct-p-eagle"),
        "export": _examples(
            "peagle export heads/smollm2-135m-instruct-p-eagle --target smollm2-135m --out exported",
            "peagle export runs/model/head --out exported",
        ),
        "profile": _examples(
            "peagle profile smollm2-135m --steps 16",
            "peagle profile org/model --head my-head --num-speculative-tokens 7 --concurrency 8 --out profile-me.json",
            "peagle profile folder-with-config --load-format dummy --concurrency 64 --trace trace.json",
        ),
        "serve": _examples(
            "peagle serve smollm2-135m",
            "peagle serve org/model --head my-head --num-speculative-tokens auto --max-num-seqs 128 --port 8001",
            "peagle serve org/model --host 0.0.0.0 --api-key secret --ssl-certfile cert.pem --ssl-keyfile key.pem",
        ),
        "bench": _examples(
            "peagle bench serve --dataset-name mt-bench --max-concurrency 8",
            "peagle bench sweep smollm2-135m --out sweep-me.json",
            "peagle bench compare before.json after.json",
        ),
        "bench serve": _examples(
            "peagle bench serve --dataset-name mt-bench --max-concurrency 1",
            "peagle bench serve --dataset-name hf --dataset-path philschmid/mt-bench --num-prompts 80 "
            "--max-concurrency 1 --model $MODEL --base-url $BASE_URL --temperature 0.0 --hf-output-len 2048",
            "peagle bench serve --dataset-name custom --dataset-path humaneval.jsonl --custom-output-len 2048 "
            "--request-rate 4 --goodput 'ttft:500 tpot:20' --save-result",
        ),
        "bench sweep": _examples(
            "peagle bench sweep smollm2-135m --out sweep-me.json",
            "peagle bench sweep org/model --head my-head --eagle3-head other-head --datasets mt-bench,mine.jsonl "
            "--k 3,5,7 --concurrency 1,8,64 --prompts-per-client 4 --out sweep-me.json",
            "peagle bench sweep org/model --head my-head --methods p-eagle,none --seconds 600 --out s.json --resume",
        ),
        "eval": _examples(
            "peagle eval heads/smollm2-135m-instruct-p-eagle smollm2-135m --sets mt-bench --k 5 --temperature 0 "
            "--max-num-seqs 16",
            "peagle eval my-head org/model --sets mt-bench,mine.jsonl --k 3,5,7 --temperature 0,1 --out eval-me.json",
            "peagle eval my-head org/model --sets none --accuracy humaneval,gsm8k --run-code --k 5",
        ),
        "bench compare": _examples(
            "peagle bench compare before.json after.json",
            "peagle bench compare before.json after.json --fail-on-regression 3",
        ),
        "demo": _examples("peagle demo", "peagle demo --max-tokens 64"),
    }
)

ENGINE_FLAGS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "Engine": {
            "max_model_len": "Longest prompt and answer, in tokens (default: the model's context, if it fits).",
            "max_num_seqs": "Requests that run at once.",
            "max_num_batched_tokens": "Prompt tokens of a step; longer prompts are cut into chunks.",
            "gpu_memory_utilization": "Share of the GPU's whole memory that may be in use, up to 1.",
            "block_size": "Tokens of a KV cache block.",
            "enable_prefix_caching": "Keep the KV cache of prompts for later ones that begin alike.",
            "graphs": "On a GPU, replay decode steps as CUDA graphs.",
            "prompt_graphs": "On a GPU, replay passes over short prompts as CUDA graphs too.",
            "async_scheduling": "On a GPU, prepare a step while the one before it runs.",
            "unpack_experts": "On a GPU, unpack MXFP4 experts at load: four times the memory.",
            "draft_lm_head": "On a GPU, int8: 8 bits a weight of the head's output layer; no answer changes.",
            "kernels": "torch, triton, or auto: triton on GPU; invariant: triton, rows rounded alike in every batch.",
            "dtype": "float32, bfloat16, or auto: float32 on CPU, bfloat16 on GPU.",
            "device": "cpu, cuda, or auto: a GPU if there is one.",
        },
    }
)
ENGINE_ALIASES: Mapping[str, str] = MappingProxyType({"graphs": "/--enforce-eager"})  # vLLM's name


def engine_texts(*flags: str) -> dict[str, str]:
    """The help texts of flags that other verbs share with the engine."""
    return {flag: ENGINE_FLAGS["Engine"][flag] for flag in flags}


SPECULATION_FLAGS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "Speculation": {
            "speculative_config": "vLLM's speculative config.",
            "head": "Head to draft with: directory or Hub id.",
            "num_speculative_tokens": "Draft tokens per round (default: 5), or auto: what pays best, by measurement.",
            "speculation": "Decode with drafts, or without.",
        },
    }
)
SPECULATION_METAVARS: Mapping[str, str] = MappingProxyType(
    {"speculative_config": "JSON", "head": "DIR", "num_speculative_tokens": "K"}
)

ANSWER_FLAGS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "Sampling": {
            "max_tokens": "Longest answer, in tokens.",
            "temperature": "Sampling temperature; 0 is greedy.",
            "top_p": "Nucleus sampling; 1 is off.",
            "top_k": "Sample among the K likeliest tokens; 0 is off.",
            "min_p": "Drop tokens less likely than this share of the likeliest; 0 is off.",
            "presence_penalty": "Subtracted from logits of tokens said before; 0 is off.",
            "frequency_penalty": "Subtracted once for each time a token was said; 0 is off.",
            "repetition_penalty": "Divides logits of tokens said or in the prompt; 1 is off.",
            "seed": "Seed of the sampling noise; a fresh one if left out.",
        },
    }
)

SERVE_FLAGS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "Server": {
            "host": "Address to listen at; 0.0.0.0 is every one of this machine.",
            "port": "Port to listen at; 0: any that is free.",
            "api_key": "Key that clients must send; without it everyone is served who reaches the port.",
            "served_model_name": "Name of the model in the API (default: MODEL).",
            "max_waiting": "Requests that may wait for their turn; more are refused with status 429.",
            "request_timeout": "Seconds after which an answer is cut (default: never).",
            "receive_timeout": "Seconds for the head of a request to arrive, and then for its body.",
            "drain_seconds": "Seconds that running requests get to finish after SIGTERM or Ctrl-C.",
            "ssl_certfile": "Certificate for HTTPS.",
            "ssl_keyfile": "Key of that certificate, if it is in a file of its own.",
            "tool_call_parser": "How the model writes calls: hermes, llama3_json, or auto: by its chat template.",
            "warm_up": "all: capture every kind of step before listening (GPU); basic: only those without filters, "
            "penalties, grammars and log-probabilities, the others when they first come.",
            "reasoning_parser": "think: answers may begin with <think>...</think>; none, or auto: by the template.",
            "allowed_origins": "Origins of web pages that may use the server, * for all (default: none).",
            "page": "Serve a page to chat with at /.",
            "log_level": "debug, info (a line per request, and one of throughput), warning or error.",
            "trust_remote_code": "Accepted and said to be without effect: no code that comes with a model is ever run.",
        },
    }
)

SELF_PROMPT_FLAGS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "Draws": {
            "count": "User turns to draw; repeated, unfinished and very short ones are left out.",
            "temperature": "Sampling temperature.",
            "top_p": "Nucleus sampling; 1 is off.",
            "max_tokens": "Longest user turn, in tokens; longer ones are left out.",
            "seed": "Seed of the sampling noise.",
        },
        "Running": {
            "max_num_seqs": "Turns drawn at once.",
            **engine_texts("dtype", "device"),
        },
    }
)

PROFILE_FLAGS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "Profile": {
            "concurrency": "Requests that decode side by side.",
            "steps": "Steps to time, and then as many to profile.",
            "prompt_tokens": "Length of the random prompts.",
        },
        "Running": {
            "load_format": "dummy: random weights for MODEL, which then needs no more than its config.json.",
            **engine_texts("graphs", "async_scheduling", "draft_lm_head", "kernels", "dtype", "device"),
        },
    }
)

PREPARE_FLAGS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "Answers": {
            "max_tokens": "Longest answer, in tokens.",
            "temperatures": "One answer per prompt and temperature; 0 is greedy.",
            "top_p": "Nucleus sampling; 1 is off.",
            "top_k": "Sample among the K likeliest tokens; 0 is off.",
            "seed": "Seed of the sampling noise.",
            "max_prompt_tokens": "Skip prompts longer than this.",
            "limit": "Use only the first prompts of the files, this many.",
        },
        "Running": {
            "shard_size": "Documents per parquet file; a finished file survives an interruption.",
            "max_num_seqs": "Prompts answered at once.",
            **engine_texts("dtype", "device"),
        },
    }
)

EXTRACT_FLAGS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "Features": {
            "tap_ids": "Target layers whose input the head reads (default: 2, n/2, n-3).",
            "shard_gib": "Size of a file in GiB; a finished file survives an interruption.",
            "dtype": "bfloat16, float32 or auto: the precision that `train` computes in.",
            **engine_texts("device"),
        },
    }
)

TRAIN_FLAGS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "Head": {
            "method": "p-eagle, or eagle3: the baseline that drafts one token a pass.",
            "num_layers": "Layers of the head.",
            "num_depths": "Tokens the head learns to draft in one pass; for eagle3, passes it is unrolled over.",
            "tap_ids": "Target layers whose input the head reads (default: 2, n/2, n-3).",
            "mask_token_id": "Vocabulary id that marks mask slots (default: an unused id).",
            "norm_before_fc": "Normalise the taps before they are combined.",
            "target_init": "Start from the target's last layers.",
            "init_head": "Head (EAGLE-3 or P-EAGLE) to start from: its architecture, taps and draft vocabulary rule.",
            "train_embeddings": "Train the embedding table.",
            "train_lm_head": "Train the output rows.",
            "draft_vocab_size": "Keep only the tokens most frequent in the answers (default: all).",
            "sliding_window": "Positions that sliding layers see, their own included (default: all before it).",
            "sliding_layers": "Layers that slide, counted from 0 (default: every layer, once there is a window).",
            "compact": "Store no table that equals the target's.",
            "int8": "Store the layers in 8 bits.",
        },
        "Rows": {
            "batch_positions": "Positions per pack; a step takes `--accumulate` packs.",
            "keep_ratio": "Share of anchors that each depth keeps of the one before.",
            "min_keep": "Lowest share of anchors that any depth keeps.",
            "supervised_share": "Share of supervised positions that mask rows are reserved for (default: the data's).",
        },
        "Memory": {
            "partition": "How rows are run: prefix-once, algorithm1 (the paper's segments) or flat (all at once).",
            "segments": "Segments of algorithm1.",
            "chunk_rows": "Mask rows run at once by prefix-once (default: what fits in memory).",
            "checkpoint_activations": "Keep only each layer's input and compute the rest again going backwards.",
            "accumulate": "Packs per optimiser step.",
            "parallel": "On several GPUs: ddp (a whole copy on each) or fsdp (parameters spread over them).",
        },
        "Loss": {
            "loss": "soft-ce (the target's distribution), kl (the same less its entropy) or hard-ce (its token).",
            "tv_weight": "Share of total variation distance mixed into the loss.",
            "depth_weight": "gamma (depth d weighs depth_decay to the power d), flat, or per-depth (all depths alike).",
            "depth_decay": "The base of gamma.",
            "loss_chunk": "Rows whose logits exist at once.",
        },
        "Optimiser": {
            "optimizer": "muon or adamw.",
            "muon_lr": "Peak rate of the matrices under Muon.",
            "adamw_lr": "Peak rate of everything AdamW updates.",
            "warmup_steps": "Steps of linear warm-up.",
            "max_steps": "Stop after this many steps.",
            "max_seconds": "Stop after this much training time.",
            "epochs": "Passes over the data, where neither limit above comes first.",
            "clip_norm": "Largest gradient norm.",
            "ema_decay": "Evaluate and export an average of the weights with this decay, such as 0.999 (default: off).",
        },
        "Running": {
            **engine_texts("dtype", "device"),
            "attention": "reference (torch), flex, kernel (Triton), or auto: kernel on GPU.",
            "compile": "Compile the step with torch.compile.",
            "graphs": "On a GPU replay steps as CUDA graphs, where a pack is one chunk.",
            "cache_features": "Compute the target's features once and keep them in memory.",
            "features": "Folder that `peagle extract` wrote: read the target's features from it.",
            "seed": "Seed of initialisation, data order and drops.",
            "log_interval": "Steps between progress lines.",
            "save_interval": "Steps between checkpoints.",
            "eval_interval": "Steps between evaluations (default: those between checkpoints).",
            "keep": "Checkpoints to keep, the newest included.",
            "logger": "Besides train.jsonl: tensorboard, wandb, trackio.",
            "holdout": "Documents kept for validation.",
            "serve_tokens": "Tokens that every evaluation decodes per held-out prompt, to measure acceptance; 0: none.",
            "serve_k": "Drafts per round of that decoding (default: the depths trained).",
        },
    }
)
