"""What the speed benchmarks of this engine and of vLLM have in common: shapes, drafters, acceptance, the row.

Weights are random. Drafters have the sizes of published heads: P-EAGLE 4 layers over the whole vocabulary, EAGLE-3 one
layer over 32,000 tokens; layers are as wide as the target's, but three hidden sizes where that has experts.
"p-eagle-32k" is a P-EAGLE head over 32,000 tokens: it shows what of the difference between the two is the vocabulary's.
"p-eagle-int8" is the published size again, its output layer read with 8 bits a weight, at the acceptance of the other
less what that cost the shipped head (benchmarks/results/draft-lm-head-smollm2-135m-cpu.json).

Acceptance is drawn by chance with geometric rates: the i-th draft is kept in a share a^i of the steps, a such that the
mean length comes out as set. "assumed": a plausible length for each method, K and target, not measured; P-EAGLE's
are above EAGLE-3's, as in its paper. "equal": EAGLE-3 at P-EAGLE's lengths, so that only the price of drafting differs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from peagle.bench.report import Json
from peagle.drafters.eagle3 import DrafterConfig
from peagle.drafters.head_config import default_tap_ids
from peagle.models.spec import ModelSpec

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 512
CONCURRENCY = (1, 8, 64)
P_EAGLE, EAGLE3, PLAIN = "p-eagle", "eagle3", "none"
P_EAGLE_32K, P_EAGLE_INT8 = "p-eagle-32k", "p-eagle-int8"
METHODS = (P_EAGLE, EAGLE3, PLAIN, P_EAGLE_32K, P_EAGLE_INT8)
_EAGLE3_LAYERS, _P_EAGLE_LAYERS = 1, 4
_SMALL_VOCAB = 32_000

# Stands in the settings of every result whose tokens per second rest on such acceptance.
SYNTHETIC = "SYNTHETIC: drafts are kept by chance, at mean lengths that were set; weights are random"

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5}
_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 151_936, "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000, "tie_word_embeddings": True, "max_position_embeddings": 32_768, "num_key_value_heads": 2,
    "bos_token_id": 151_643, "eos_token_id": 151_645,
}  # fmt: skip
_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "rms_norm_eps": 1e-5,
    "rope_theta": 150_000, "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "num_experts_per_tok": 4, "swiglu_limit": 7.0, "tie_word_embeddings": False,
}  # fmt: skip
_EVERY = {"hidden_act": "silu", "torch_dtype": "bfloat16"}

# Hugging Face config.json of each shape.
SHAPES: Mapping[str, Json] = MappingProxyType(
    {
        "smollm2-135m": {
            **_EVERY, **_LLAMA, "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536,
            "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "rope_theta": 100_000,
            "max_position_embeddings": 8192, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
        },
        "qwen2.5-coder-0.5b": {
            **_EVERY, **_QWEN2, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
            "num_attention_heads": 14,
        },
        "qwen2.5-1.5b": {
            **_EVERY, **_QWEN2, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
            "num_attention_heads": 12,
        },
        "qwen3-8b": {
            **_EVERY, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151_936,
            "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000,
            "max_position_embeddings": 40_960, "tie_word_embeddings": False, "bos_token_id": 151_643,
            "eos_token_id": 151_645,
        },
        "gpt-oss-20b": {
            **_EVERY, **_GPT_OSS, "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880,
            "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
            "quantization_config": {
                "quant_method": "mxfp4",
                "modules_to_not_convert": [
                    "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
                ],
            },
            "num_local_experts": 32, "sliding_window": 128, "max_position_embeddings": 131_072,
            "bos_token_id": 199_998, "eos_token_id": 200_002,
        },
        "tiny-gpt-oss": {
            **_EVERY, **_GPT_OSS, "vocab_size": 320, "hidden_size": 48, "intermediate_size": 32, "num_hidden_layers": 4,
            "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 6,
            "sliding_window": 8, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2,
        },
        "tiny": {
            **_EVERY, **_LLAMA, "vocab_size": 320, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4,
            "num_attention_heads": 6, "num_key_value_heads": 2, "rope_theta": 10_000, "max_position_embeddings": 2048,
            "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
        },
    }
)  # fmt: skip
REAL_SHAPES = tuple(name for name in SHAPES if not name.startswith("tiny"))

_P_EAGLE_LENGTHS = MappingProxyType({1: 1.81, 3: 3.02, 5: 3.50, 7: 3.94})
_SMALL_P_EAGLE_LENGTHS = MappingProxyType({1: 1.76, 3: 2.74, 5: 3.12, 7: 3.40})
_EAGLE3_LENGTHS = MappingProxyType({3: 2.65, 5: 2.90, 7: 3.03})
_INT8_SHARE = 0.996  # of the length that 8 bits leave, at temperature 0


@dataclass(frozen=True, slots=True)
class Setup:
    """One engine to measure. `acceptance`: "assumed" or "equal" as above."""

    shape: str
    method: str
    num_drafts: int
    acceptance: str = "assumed"

    @property
    def acceptance_length(self) -> float:
        """The mean length that is set; 1 without drafts."""
        if self.method == PLAIN:
            return 1.0
        own = _SMALL_P_EAGLE_LENGTHS if self.shape == "smollm2-135m" else _P_EAGLE_LENGTHS
        lengths = _EAGLE3_LENGTHS if self.method == EAGLE3 and self.acceptance == "assumed" else own
        length = lengths[self.num_drafts]
        return round(_INT8_SHARE * length, 3) if self.method == P_EAGLE_INT8 else length

    @property
    def draft_lm_head(self) -> str:
        """As the engine's setting."""
        return "int8" if self.method == P_EAGLE_INT8 else "auto"

    @property
    def label(self) -> str:
        """Short and unique."""
        drafts = f" K={self.num_drafts}" if self.num_drafts else ""
        return f"{self.shape} {self.method}{drafts}" + (" equal" if self.acceptance == "equal" else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpeedRow:
    """One engine at one concurrency (result names `engine-speed-*` and `peer-vllm-*`).

    Only steps in which all requests decode are timed; `ms_per_step` is the median of the repeats, a step one round of
    every request. `tokens_per_second` is `acceptance_length`, the one set, x concurrency / `ms_per_step`. `gpu_busy_ms`
    is of a profiled step, `gpu_busy_share` that over the time of the steps just before it; `drafting_ms` is what of it
    is the drafter's. `floor_ms` is what reading weights, keys and values takes at the bandwidth in the settings. None
    is what was not profiled or computed.
    """

    shape: str
    method: str
    num_speculative_tokens: int
    concurrency: int
    acceptance: str
    acceptance_length: float
    acceptance_length_measured: float
    ms_per_step: float
    ms_per_step_lowest: float
    ms_per_step_highest: float
    tokens_per_second: float
    repeats: int
    steps: int  # of all repeats together
    mean_context: float
    gpu_busy_ms: float | None = None
    gpu_busy_share: float | None = None
    drafting_ms: float | None = None
    kernels_per_step: float | None = None
    launches_per_step: float | None = None
    graph_launches_per_step: float | None = None
    mbytes_per_step: float | None = None
    floor_ms: float | None = None
    times_floor: float | None = None


def geometric_rate(acceptance_length: float, num_drafts: int) -> float:
    """The chance a of every draft once those before it were kept: 1 + a + ... + a^K is the length."""
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        if 1 + sum(rate**i for i in range(1, num_drafts + 1)) < acceptance_length:
            low = rate
        else:
            high = rate
    return high


def drafter_config(spec: ModelSpec, method: str) -> DrafterConfig:
    """The drafter of a method for a target of this shape."""
    return DrafterConfig(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size if spec.moe is None else 3 * spec.hidden_size,
        num_layers=_EAGLE3_LAYERS if method == EAGLE3 else _P_EAGLE_LAYERS,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=1e-5,
        rope=spec.rope,
        max_position_embeddings=spec.max_position_embeddings,
        vocab_size=spec.vocab_size,
        draft_vocab_size=_small_vocab(spec.vocab_size) if method in (EAGLE3, P_EAGLE_32K) else spec.vocab_size,
        target_hidden_size=spec.hidden_size,
        tap_ids=default_tap_ids(spec.num_layers),
        mask_token_id=None if method == EAGLE3 else spec.vocab_size - 20,
    )


def _small_vocab(vocab_size: int) -> int:
    return _SMALL_VOCAB if vocab_size > _SMALL_VOCAB else vocab_size // 2


def random_prompts(vocab_size: int, count: int) -> list[list[int]]:
    """The same for every engine; without the ends of the vocabulary, where special tokens are."""
    return np.random.default_rng(0).integers(10, vocab_size - 100, (count, PROMPT_TOKENS)).tolist()


def plan(shapes: list[str], methods: list[str], num_drafts: list[int], *, equal: bool) -> list[list[Setup]]:
    """Groups of setups that are measured side by side, the most important first; a group has one shape."""
    order = sorted(shapes, key=lambda shape: shape not in ("smollm2-135m", "qwen3-8b"))

    def group(shape: str, *kinds: tuple[str, int], acceptance: str = "assumed") -> list[Setup]:
        wanted = [(m, k) for m, k in kinds if m in methods and (m == PLAIN or k in num_drafts)]
        return [Setup(shape, method, k, acceptance) for method, k in wanted]

    groups = [group(shape, (P_EAGLE, 7), (PLAIN, 0), (EAGLE3, 3), (P_EAGLE_INT8, 7)) for shape in order]
    groups += [group(shape, (EAGLE3, 7), (P_EAGLE_32K, 7), (P_EAGLE, 3), (P_EAGLE, 5), (EAGLE3, 5)) for shape in order]
    groups += [group(shape, (P_EAGLE, 1), (P_EAGLE_INT8, 3)) for shape in order]
    if equal:
        groups += [group(shape, (EAGLE3, 3), (EAGLE3, 5), (EAGLE3, 7), acceptance="equal") for shape in order]
    return [setups for setups in groups if setups]


def hf_config(shape: str) -> dict[str, Any]:
    """config.json of a shape, to be written."""
    return dict(SHAPES[shape])
