"""A tiny random engine, and drafts forced to any accept pattern."""

import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from peagle.config import EngineConfig
from peagle.drafters.eagle3 import Eagle3Drafter
from peagle.drafters.init import new_drafter
from peagle.engine.batch import HostShape, Rows
from peagle.engine.engine import LLM
from peagle.engine.request import Request, RequestOutput
from peagle.engine.slots import SlotState
from peagle.engine.step import DraftSide, SpeculativeStep
from peagle.kernels.paged_attention import TilePlan
from peagle.kernels.paged_decode import DecodePlan
from peagle.models.decoder import TargetModel
from peagle.models.layers import RopeSpec
from peagle.models.spec import ModelSpec
from peagle.models.target import Target
from tests.helpers import random_weights

EOS = 1
# Layers that are fused, streamed, cut and left to cuBLAS by turns elsewhere, and on Hopper some that have a ring.
SHAPES: dict[str, dict[str, Any]] = {
    "small": {"hidden_size": 576, "intermediate_size": 1536, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
    "large": {"hidden_size": 2048, "intermediate_size": 8192, "num_heads": 16, "num_kv_heads": 4, "head_dim": 128},
}


def tiny_spec(**changes: Any) -> ModelSpec:
    sizes = dict(
        family="llama", vocab_size=96, hidden_size=32, intermediate_size=48, num_layers=4, num_heads=4, num_kv_heads=2,
        head_dim=8, rms_norm_eps=1e-5, rope=RopeSpec(theta=1e4, head_dim=8), max_position_embeddings=128,
        qkv_bias=False, o_bias=False, mlp_bias=False, tie_word_embeddings=True, bos_token_id=0, eos_token_ids=(EOS,),
    )  # fmt: skip
    return ModelSpec(**{**sizes, **changes})


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable character, then made-up two-character words up to 96 ids."""
    words = ["<s>", "</s>", *string.ascii_letters, *string.digits, *(f"{c}{c}" for c in string.ascii_letters)]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words[:96])}, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def tiny_parts(
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    parallel: bool = True,
    window: int | None = None,
    draft_ids: Sequence[int] | None = None,
    layers: int = 4,
    head_dim: int = 8,
) -> tuple[Target, Eagle3Drafter]:
    """Random target and random two-layer head, P-EAGLE or EAGLE-3; with a `window`, its second layer slides."""
    spec = tiny_spec(num_layers=layers, head_dim=head_dim, rope=RopeSpec(theta=1e4, head_dim=head_dim))
    model = TargetModel(spec).eval().requires_grad_(False)
    random_weights(model, seed)
    target = Target("tiny", Path("tiny"), spec, model.to(dtype), tiny_tokenizer())
    drafter = new_drafter(
        target.model, num_layers=2, tap_ids=(layers // 4, layers // 2, layers),
        mask_token_id=95 if parallel else None, seed=seed + 1, target_init=False,
        sliding_window=window, sliding_layers=window and (1,),
        draft_ids=None if draft_ids is None else torch.tensor(draft_ids),
    )  # fmt: skip
    return target, drafter.to(dtype).eval().requires_grad_(False)


def tiny_llm(
    k: int = 3,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    parallel: bool = True,
    window: int | None = None,
    layers: int = 4,
    head_dim: int = 8,
    **engine: Any,
) -> LLM:
    """The engine of `tiny_parts`; `engine` overrides `EngineConfig`."""
    target, drafter = tiny_parts(dtype, seed, parallel, window, layers=layers, head_dim=head_dim)
    device = engine.get("device", "cpu")
    target.model.to(device), drafter.to(device)
    return LLM.from_parts(target, drafter, k, EngineConfig(**{"block_size": 4, "max_num_seqs": 8, **engine}))


def sized_llm(
    shape: str, k: int, *, parallel: bool = True, context: int = 1024, vocab_size: int = 96, **engine: Any
) -> LLM:
    """An engine of one of `SHAPES` on the GPU, in bfloat16: a random target of three layers, a random head of two."""
    sizes = {**SHAPES[shape], "max_position_embeddings": context, "vocab_size": vocab_size}
    spec = tiny_spec(num_layers=3, rope=RopeSpec(theta=1e4, head_dim=sizes["head_dim"]), **sizes)
    model = TargetModel(spec).eval().requires_grad_(False)
    random_weights(model, 3)
    target = Target("tiny", Path("tiny"), spec, model.to("cuda", torch.bfloat16), tiny_tokenizer())
    head = new_drafter(
        target.model, num_layers=2, tap_ids=(0, 1, 3), mask_token_id=95 if parallel else None, seed=4, target_init=False
    )  # fmt: skip
    head = head.to("cuda", torch.bfloat16).eval().requires_grad_(False)
    return LLM.from_parts(target, head, k, EngineConfig(**engine))


def expect_triton(llm: LLM, *, captured: bool = True) -> None:
    """Target and head attend by Triton's kernels, in decode steps and over prompts, and both can be graphs: a model
    whose heads have 8 dims falls back to torch without a word."""
    core, step = llm.core, llm.core._speculative
    assert llm.drafter is not None
    tables = np.zeros((1, 1), dtype=np.int64)
    host, tables_BN = HostShape(np.array([4]), np.array([4]), tables), torch.from_numpy(tables).to(core.device)
    for sizes in (llm.target.spec, llm.drafter.config):
        decode = step._plan(tables_BN, 4, None, sizes)
        assert isinstance(decode, DecodePlan)
        assert decode.triton
        assert isinstance(step._plan(tables_BN, None, host, sizes), TilePlan)
    assert core._graphs is not None
    assert core._graphs._enabled == captured
    assert (core._prompt_graphs is not None) == captured


def random_prompts(count: int, seed: int = 0, longest: int = 30) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, 95, rng.integers(1, longest)).tolist() for _ in range(count)]


def force_drafts(llm: LLM, plain: Sequence[RequestOutput], seed: int, right: float = 0.8) -> None:
    """Make the drafter propose what the target will say, each draft kept with probability `right`, else wrong.

    The real drafter still runs, so its cache is exercised by every accept pattern. What to say is looked up on the
    device, by slot and position, so it works in a captured step too.
    """
    rng = np.random.default_rng(seed)
    core, step = llm.core, llm.core._speculative
    state, original, admit = step.state, _ORIGINAL_DRAFT, SlotState.admit
    known_SL = torch.zeros((len(state.last_token), llm.max_model_len + 64), dtype=torch.int64, device=core.device)

    def admit_known(requests: Sequence[Request]) -> None:
        admit(state, requests)
        for request in requests:
            tokens = np.array(request.prompt_ids + plain[request.index].token_ids)
            wrong = rng.random(len(tokens)) >= right
            line = torch.from_numpy(np.where(wrong, (tokens + 1) % 95, tokens)).to(core.device)
            known_SL[request.slot, : len(line)] = line

    def drafts(
        side: DraftSide, rows: Rows, kept_B: Tensor, next_B: Tensor, taps_TC: Tensor, num_drafts: int, mode: Any
    ) -> Tensor:
        original(step, side, rows, kept_B, next_B, taps_TC, num_drafts, mode)
        first_B = (rows.first_B + kept_B + 2).clamp(max=known_SL.shape[1] - 1 - num_drafts)
        at_BK = first_B[:, None] + torch.arange(num_drafts, device=first_B.device)
        return known_SL[rows.slot_B[:, None], at_BK]

    state.admit = admit_known  # type: ignore[method-assign]
    step._draft = drafts  # type: ignore[method-assign]


def drafts_of(llm: LLM) -> Tensor:
    """What the slots hold to be verified next, [S, K]."""
    return llm.core._speculative.state.drafts[:-1].clone()


_ORIGINAL_DRAFT = SpeculativeStep._draft
