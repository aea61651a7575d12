"""Help texts of the flags of the `bench` verbs; their examples stand in `peagle.help`."""

from collections.abc import Mapping
from types import MappingProxyType

from peagle.bench.settings import ACCURACY_TASKS, BACKENDS, DATASETS, METRICS
from peagle.bench.sweep_settings import METHODS
from peagle.help import engine_texts

BENCH_SERVE_FLAGS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "Server": {
            "base_url": "URL of the server, such as http://localhost:8000; in place of host and port.",
            "host": "Host of the server.",
            "port": "Port of the server.",
            "backend": f"{', '.join(BACKENDS)} (default: openai-chat; for random tokens openai).",
            "endpoint": "Path of the API (default: that of the backend).",
            "model": "Name of the model in the API (default: the one the server has).",
            "api_key": "Key of the server (default: OPENAI_API_KEY of the environment).",
            "timeout": "Seconds after which a request is given up and counted as failed (default: never).",
        },
        "Prompts": {
            "dataset_name": f"{', '.join(DATASETS)}.",
            "dataset_path": "File of the prompts; for hf the id of a data set, or a local copy of it.",
            "num_prompts": "Requests to send (default: one per row; of random tokens 1000).",
            "seed": "Seed of the order of prompts, of arrival times and of random tokens.",
            "shuffle": "Draw the prompts in random order, or take them as the file has them.",
            "oversample": "Repeat rows where more prompts are asked for than there are.",
            "hf_subset": "Subset of a data set of the Hub.",
            "hf_split": "Split of it.",
            "category": "Only rows of this category.",
        },
        "Lengths": {
            "output_len": "Longest answer in tokens, for any data set (default: 256).",
            "hf_output_len": "The same, for hf alone.",
            "custom_output_len": "The same, for custom alone; -1: the output_tokens of each row.",
            "sharegpt_output_len": "The same, for sharegpt alone.",
            "spec_bench_output_len": "The same, for spec-bench alone.",
            "speed_bench_output_len": "The same, for speed-bench alone.",
            "random_input_len": "Tokens of a random prompt.",
            "random_output_len": "Longest answer to a random prompt.",
            "random_vocab_size": "Random token ids are below this.",
        },
        "Load": {
            "request_rate": "Requests per second, at random times; inf: all at once.",
            "burstiness": "Shape of the times between requests: 1 is Poisson, below it burstier, above it steadier.",
            "max_concurrency": "Most requests under way (default: no limit).",
            "num_warmups": "Requests to send before anything is measured.",
        },
        "Requests": {
            "temperature": "Sampling temperature; 0 is greedy.",
            "top_p": "Nucleus sampling.",
            "top_k": "Sample among the K likeliest tokens.",
            "min_p": "Drop tokens less likely than this share of the likeliest.",
            "ignore_eos": "Go on to the full length, past the end of the answer.",
            "request_seeds": "Send each request a seed of its own, made from --seed.",
            "extra_body": "JSON object of further fields of every request.",
        },
        "Report": {
            "goodput": "Limits that a good request keeps, in ms: 'ttft:500 tpot:20'; also e2el.",
            "percentile_metrics": f"Figures to show: {', '.join(METRICS)}.",
            "metric_percentiles": "Percentiles to show.",
            "save_result": "Write the result as JSON.",
            "save_detailed": "Keep the text and the times of every chunk in it too.",
            "result_dir": "Folder for it.",
            "result_filename": "Its name (default: made from time, model and data set).",
            "label": "A word of yours that stands in the result.",
            "disable_tqdm": "Show no progress.",
        },
        "Of vLLM, without effect": {
            "tokenizer": "Servers count tokens themselves.",
            "trust_remote_code": "No code of a model is run.",
        },
    }
)

EVAL_FLAGS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "Acceptance": {
            "sets": "Prompt sets: mt-bench, humaneval, gsm8k, mbpp, or prompts files; none: no acceptance.",
            "limit": "Prompts of each set, spread over it (default: all). A card of whole sets is then not checked.",
            "k": "Draft tokens per round; each is measured.",
            "temperatures": "Sampling temperatures; each is measured, 0 is greedy.",
            "max_tokens": "Longest answer, in tokens.",
            "seed": "Seed of sampling and of the intervals.",
            "lossless_prompts": "Prompts answered without drafts too, to compare token by token; 0: none.",
        },
        "Accuracy": {
            "accuracy": f"Tasks whose answers are marked: {', '.join(ACCURACY_TASKS)}.",
            "accuracy_tokens": "Longest answer to them, in tokens.",
            "run_code": "RUN PROGRAMS THAT THE MODEL WROTE, as HumanEval needs: confined, but do it where they can do "
            "no harm.",
        },
        "Running": engine_texts("max_num_seqs", "draft_lm_head", "kernels", "dtype", "device"),
    }
)
EVAL_ALIASES: Mapping[str, str] = MappingProxyType({"temperatures": "--temperature"})
# vLLM's name for the order of the file.
BENCH_SERVE_ALIASES: Mapping[str, str] = MappingProxyType({"shuffle": "/--disable-shuffle"})

SWEEP_FLAGS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "Grid": {
            "datasets": "mt-bench, humaneval, gsm8k, mbpp, or prompt files.",
            "methods": f"{', '.join(METHODS)} (default: none, and those there is a head for).",
            "k": "Draft tokens per round.",
            "concurrency": "Requests in flight.",
            "repeats": "How often every cell is measured, in turns with the others.",
        },
        "Cells": {
            "num_prompts": "Prompts that a cell answers; a set with fewer begins again.",
            "prompts_per_client": "At most this many x concurrency, so that few requests at once do not take longest.",
            "min_prompts": "But no fewer than this: 8 or more have intervals.",
            "max_tokens": "Longest answer, in tokens.",
            "temperature": "Sampling temperature; 0 is greedy.",
            "ignore_eos": "Go on to the full length, past the end of the answer.",
            "seed": "Seed of the order of prompts and of the sampling noise.",
        },
        "Running": {
            "seconds": "Begin no cell that would not end within this time; --resume goes on later.",
            **engine_texts("prompt_graphs", "dtype", "device"),
        },
    }
)
