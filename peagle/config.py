"""Every setting of the project, one frozen dataclass per verb: the only source of defaults."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Self

from peagle.checks import (
    check_at_least,
    check_between,
    check_choice,
    check_positive,
    check_share,
    check_switches,
    parse_object,
)
from peagle.errors import PeagleError

MAX_SPECULATIVE_TOKENS = 16
_MOST_SEQS = 65_536  # requests that an engine may hold at once; their states are allocated
DEFAULT_MAX_SPECULATIVE_TOKENS = 7  # of "auto", for a head that does not say how deep it was trained
# Keys of vLLM's speculative config that change nothing here; accepted so that its JSON can be pasted unchanged.
_IGNORED_VLLM_KEYS = frozenset({"draft_tensor_parallel_size", "disable_padded_drafter_batch"})


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculativeConfig:
    """vLLM's `--speculative-config`, the keys that matter for P-EAGLE and EAGLE-3, and two of our own.

    `model` is a head directory or Hub id, `num_speculative_tokens` is K, or "auto": then the engine chooses K step by
    step, 0 to `max_speculative_tokens` (default: the head's trained depth), from measured costs or, if given, from
    `k_table`: a mapping of concurrency to K or a JSON file of one. `parallel_drafting` None means: as the head says.

    `rejection_sample_method` "synthetic" keeps drafts by chance, so that an engine can be timed without a trained head:
    its tokens mean nothing. The chances are `synthetic_acceptance_length` (the mean, the bonus token counted) or
    `synthetic_acceptance_rates` (of K shares, the i-th that of steps that keep draft i).
    """

    model: str
    num_speculative_tokens: int | str
    method: str = "eagle3"
    parallel_drafting: bool | None = None
    max_speculative_tokens: int | None = None
    k_table: Mapping[Any, Any] | str | None = None
    rejection_sample_method: str = "standard"
    synthetic_acceptance_length: float | None = None
    synthetic_acceptance_rates: Sequence[float] | None = None

    def __post_init__(self) -> None:
        _check_method(self.method)
        self._check_drafts()
        if self.parallel_drafting is not None and not isinstance(self.parallel_drafting, bool):
            raise PeagleError(
                f"parallel_drafting is {self.parallel_drafting!r}: it must be true or false, without quotes"
            )
        if not isinstance(self.model, str) or not self.model:
            raise PeagleError(f"speculative config 'model' is {self.model!r}: give a head directory or Hub id")
        self._check_synthetic()

    @property
    def is_auto(self) -> bool:
        """Whether the engine chooses K."""
        return self.num_speculative_tokens == "auto"

    @property
    def max_drafts(self) -> int:
        """The largest K there can be; of "auto" without a maximum, see `for_head`."""
        if not isinstance(self.num_speculative_tokens, str):
            return self.num_speculative_tokens
        rates = self.synthetic_acceptance_rates
        return self.max_speculative_tokens or (len(rates) if rates is not None else DEFAULT_MAX_SPECULATIVE_TOKENS)

    @property
    def synthetic_rates(self) -> tuple[float, ...] | None:
        """Chance of each of `max_drafts` drafts once those before it were kept; None where drafts are verified."""
        if self.synthetic_acceptance_length is not None:
            from peagle.kernels.synthetic_acceptance import synthetic_profile  # needs torch, which takes a second

            return synthetic_profile(self.synthetic_acceptance_length, self.max_drafts)
        if self.synthetic_acceptance_rates is None:
            return None
        rates = self.synthetic_acceptance_rates
        return tuple(rate / before if before else 0.0 for rate, before in zip(rates, (1.0, *rates), strict=False))

    def for_head(self, trained_depth: int | None) -> Self:
        """The same with the maximum of "auto" settled for a head of that depth, None if it is not known."""
        if not self.is_auto or self.max_speculative_tokens is not None or self.synthetic_acceptance_rates is not None:
            return self
        depth = DEFAULT_MAX_SPECULATIVE_TOKENS if trained_depth is None else trained_depth
        return replace(self, max_speculative_tokens=min(depth, MAX_SPECULATIVE_TOKENS))

    def _check_drafts(self) -> None:
        k, most = self.num_speculative_tokens, self.max_speculative_tokens
        if k != "auto" and not _is_draft_count(k):
            limits = f"an integer from 1 to {MAX_SPECULATIVE_TOKENS}, or 'auto'"
            without = "to decode without drafts use --no-speculation, or leave the speculative config out"
            raise PeagleError(f"num_speculative_tokens is {k!r:.60}: it must be {limits}; {without}")
        if most is not None and not _is_draft_count(most):
            raise PeagleError(f"max_speculative_tokens is {most!r}: it must be 1 to {MAX_SPECULATIVE_TOKENS}")
        for name in ("max_speculative_tokens", "k_table"):
            if k != "auto" and getattr(self, name) is not None:
                raise PeagleError(f"{name} needs num_speculative_tokens 'auto', not {k}: leave one of them out")
        if self.k_table is not None and not isinstance(self.k_table, str | Mapping):
            raise PeagleError(f"k_table is {self.k_table!r}: give an object of concurrency and K, or a file of one")

    def _check_synthetic(self) -> None:
        method, length, rates = (
            self.rejection_sample_method, self.synthetic_acceptance_length, self.synthetic_acceptance_rates
        )  # fmt: skip
        if method not in ("standard", "synthetic"):
            raise PeagleError(f"rejection_sample_method {method!r} is not supported: use 'standard' or 'synthetic'")
        given = [value for value in (length, rates) if value is not None]
        if method == "standard" and given:
            raise PeagleError("synthetic acceptance is set: add rejection_sample_method 'synthetic', or leave it out")
        if method == "synthetic" and len(given) != 1:
            raise PeagleError(
                f"rejection_sample_method 'synthetic' has {'both' if given else 'neither'} of "
                "synthetic_acceptance_length and synthetic_acceptance_rates: give one"
            )
        if length is not None and not (_is_number(length) and 1 <= length <= self.max_drafts + 1):
            raise PeagleError(f"synthetic_acceptance_length is {length!r}: it must be 1 to {self.max_drafts + 1}")
        if rates is not None:
            self._check_rates(rates)

    def _check_rates(self, rates: Sequence[float]) -> None:
        name, k = "synthetic_acceptance_rates", self.max_drafts
        if not isinstance(rates, list | tuple) or not all(map(_is_number, rates)):
            raise PeagleError(f"{name} is {rates!r}: give a list of numbers")
        if not _is_draft_count(len(rates)):
            raise PeagleError(
                f"{name} has {len(rates)} numbers: give 1 to {MAX_SPECULATIVE_TOKENS}, one for each draft"
            )
        if len(rates) != k:
            raise PeagleError(f"{name} has {len(rates)} numbers: give one for each of the {k} drafts")
        outside = [rate for rate in rates if not 0 <= rate <= 1]
        if outside:
            raise PeagleError(f"{name} has {outside[0]}: each must be in 0 .. 1")
        rising = [(a, b) for a, b in pairwise(rates) if b > a]
        if rising:
            a, b = rising[0]
            raise PeagleError(f"{name} rises from {a} to {b}: a draft is kept only after those before it")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Build from a mapping; an unknown or missing key is an error that names it."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known - _IGNORED_VLLM_KEYS)
        if unknown:
            raise PeagleError(f"unknown key {unknown[0]!r} in the speculative config: known keys are {sorted(known)}")
        _check_method(values.get("method", "eagle3"))  # others have other keys
        for key in ("model", "num_speculative_tokens"):
            if key not in values:
                raise PeagleError(f"the speculative config lacks {key!r}: give 'model' and 'num_speculative_tokens'")
        return cls(**{key: value for key, value in values.items() if key in known})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the JSON given on a command line."""
        return cls.from_mapping(parse_object(text, "--speculative-config"))


def _check_method(method: object) -> None:
    if method not in ("eagle3", "peagle"):
        raise PeagleError(f"speculative method {method!r} is not supported: use 'eagle3', for P-EAGLE heads too")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Sizes and switches of one engine, named as vLLM's. `max_model_len` None means the target's own context length, or
    what the KV cache holds if that is less.

    `gpu_memory_utilization` is the share of the GPU's whole memory that may be in use once the engine stands: weights,
    KV cache, activations and graphs. `graphs` replays decode steps as CUDA graphs (off: vLLM's `enforce_eager`),
    `prompt_graphs` passes over short prompts too, padded to a few shapes, and `async_scheduling` prepares a step while
    the one before it runs; all are for CUDA alone. `kernels` is the form of everything between the matmuls: "auto" is
    Triton on CUDA; "invariant" is Triton, matmuls of the target included, in one form for any number of rows, so that
    not a bit of the output says what shared a batch. `attention` "auto" is Triton on CUDA; "library" is cuDNN's for a
    long prompt that has a pass alone, and so is "auto" where such passes wait for products. `load_format` "dummy" draws
    the target's weights at random, for benchmarks. `unpack_experts` unpacks MXFP4 experts when they are loaded, which
    takes four times the memory, instead of inside their kernel. `draft_lm_head` "int8" reads a copy of the drafter's
    output layer with 8 bits a weight.
    """

    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    block_size: int = 16
    num_kv_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    graphs: bool = True
    prompt_graphs: bool = True
    async_scheduling: bool = True
    attention: str = "auto"
    load_format: str = "auto"
    unpack_experts: bool = False
    draft_lm_head: str = "auto"
    kernels: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise PeagleError(f"dtype {self.dtype!r} is not supported: use auto, float32 or bfloat16")
        check_choice(self, "attention", "auto", "library", "torch", "triton")
        check_choice(self, "load_format", "auto", "dummy")
        check_choice(self, "draft_lm_head", "auto", "int8")
        check_choice(self, "kernels", "auto", "torch", "triton", "invariant")
        check_at_least(
            self, 1, "max_num_seqs", "max_num_batched_tokens", "block_size", "max_model_len", "num_kv_blocks"
        )
        check_at_least(self, 0, "seed")
        check_between(self, 1, _MOST_SEQS, "max_num_seqs")
        check_share(self, "(0, 1]", "gpu_memory_utilization")
        check_switches(self, "enable_prefix_caching", "graphs", "prompt_graphs", "async_scheduling", "unpack_experts")


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerConfig:
    """How `generate` samples its answers: what of `SamplingParams` has a flag, checked there. Greedy by default."""

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatConfig(AnswerConfig):
    """The same for `chat`, whose answers run longer."""

    max_tokens: int = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """The server around an engine. Port 0 is any that is free, `allowed_origins` are the web pages of other hosts that
    may use it. `request_timeout` and `drain_seconds` are in seconds; what is not done by then is cut. So is
    `receive_timeout`, for the head of a request and then for its body.
    `trust_remote_code` is there for command lines that have it: no code that comes with a model is ever run."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    served_model_name: str | None = None
    max_waiting: int = 256
    request_timeout: float | None = None
    receive_timeout: float = 30.0
    drain_seconds: float = 30.0
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    allowed_origins: tuple[str, ...] = ()
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    warm_up: str = "all"
    page: bool = True
    log_level: str = "info"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        check_between(self, 0, 65535, "port")
        check_choice(self, "tool_call_parser", "auto", "hermes", "llama3_json")
        check_choice(self, "reasoning_parser", "auto", "think", "none")
        check_choice(self, "warm_up", "all", "basic")
        check_at_least(self, 1, "max_waiting")
        check_positive(self, "request_timeout", "receive_timeout")
        check_between(self, 0, 86400, "drain_seconds")
        unknown = [o for o in {*self.allowed_origins} - {"*", "null"} if not o.startswith(("http://", "https://"))]
        if unknown:
            raise PeagleError(
                f"allowed_origins has {unknown[0]!r}: begin it with http:// or https://; * is all of them"
            )
        for name in ("host", "api_key", "served_model_name"):
            if getattr(self, name) == "":
                raise PeagleError(f"{name} is empty: give one, or leave it out")
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise PeagleError(f"log_level is {self.log_level!r}: it must be debug, info, warning or error")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise PeagleError("ssl_keyfile needs ssl_certfile: give the certificate too")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileConfig:
    """Steps to profile, in which `concurrency` requests with random prompts decode side by side."""

    concurrency: int = 1
    steps: int = 32
    prompt_tokens: int = 128
    load_format: str = "auto"
    graphs: bool = True
    async_scheduling: bool = True
    draft_lm_head: str = "auto"
    kernels: str = "auto"
    dtype: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        check_at_least(self, 1, "concurrency", "steps", "prompt_tokens")
        check_between(self, 1, _MOST_SEQS, "concurrency")
        shared = ("load_format", "draft_lm_head", "kernels", "dtype")
        EngineConfig(**{name: getattr(self, name) for name in shared})  # which checks them


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfPromptConfig:
    """User turns that the target draws from its own chat template. `count` is draws; not all become prompts."""

    count: int
    temperature: float = 1.0
    top_p: float = 0.95
    max_tokens: int = 160
    seed: int = 0
    max_num_seqs: int = 256
    dtype: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        check_at_least(self, 1, "count", "max_tokens", "max_num_seqs")
        if self.temperature == 0.0:
            raise PeagleError("temperature is 0: every draw would be the same, give a positive number")
        check_between(self, 0, 2**23 - 1, "seed")


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareConfig:
    """Regeneration of responses by the target. Sampling runs once per entry of `temperatures` for every prompt."""

    max_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0,)
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    shard_size: int = 2048
    limit: int | None = None
    max_num_seqs: int = 256
    max_prompt_tokens: int = 1024
    dtype: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        check_at_least(self, 1, "shard_size", "limit", "max_num_seqs", "max_prompt_tokens")
        if not self.temperatures or len(set(self.temperatures)) != len(self.temperatures):
            raise PeagleError(f"temperatures are {list(self.temperatures)}: give at least one, each only once")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtractConfig:
    """Target features on disk. `shard_gib` is the size of a file in GiB; one document may be larger."""

    tap_ids: tuple[int, ...] | None = None
    shard_gib: float = 1.0
    dtype: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        check_positive(self, "shard_gib")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Recipe of one head. Lengths are tokens, rates are per optimiser step."""

    # the head
    method: str = "p-eagle"
    num_layers: int = 4
    num_depths: int = 8
    tap_ids: tuple[int, ...] | None = None
    mask_token_id: int | None = None
    norm_before_fc: bool = True
    target_init: bool = True
    init_head: str | None = None
    train_embeddings: bool = True
    train_lm_head: bool = True
    draft_vocab_size: int | None = None
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] | None = None
    # rows
    batch_positions: int = 8192
    keep_ratio: float = 0.8
    min_keep: float = 0.0
    supervised_share: float | None = None
    # how a step is run
    partition: str = "prefix-once"
    segments: int = 4
    chunk_rows: int | None = None
    checkpoint_activations: bool = False
    accumulate: int = 1
    parallel: str = "ddp"
    # loss
    loss: str = "soft-ce"
    tv_weight: float = 0.0
    depth_weight: str = "gamma"
    depth_decay: float = 0.8
    loss_chunk: int = 4096
    # optimiser
    optimizer: str = "muon"
    muon_lr: float = 2e-3
    adamw_lr: float = 1e-3
    warmup_steps: int = 100
    max_steps: int | None = None
    max_seconds: float | None = None
    epochs: float = 1.0
    clip_norm: float = 1.0
    ema_decay: float | None = None
    # running it
    dtype: str = "auto"
    device: str = "auto"
    attention: str = "auto"
    compile: bool = False
    graphs: bool = True
    cache_features: bool = False
    features: str | None = None
    seed: int = 0
    log_interval: int = 20
    save_interval: int = 500
    eval_interval: int | None = None
    keep: int = 1
    logger: tuple[str, ...] = ()
    holdout: int = 64
    serve_tokens: int = 64
    serve_k: int | None = None
    compact: bool = False
    int8: bool = False

    def __post_init__(self) -> None:
        check_at_least(self, 1, "num_layers", "num_depths", "batch_positions", "segments", "loss_chunk", "accumulate")
        check_at_least(self, 1, "max_steps", "log_interval", "save_interval", "eval_interval", "keep")
        check_at_least(self, 0, "warmup_steps", "holdout", "serve_tokens")
        check_at_least(self, max(1, self.num_depths - 1), "chunk_rows")  # a chain is never cut
        check_positive(self, "epochs", "muon_lr", "adamw_lr", "clip_norm", "max_seconds")
        check_share(self, "(0, 1]", "keep_ratio", "depth_decay", "supervised_share")
        check_share(self, "[0, 1]", "min_keep", "tv_weight")
        check_share(self, "(0, 1)", "ema_decay")
        check_between(self, 1, MAX_SPECULATIVE_TOKENS, "serve_k")
        check_between(self, 0, 2**63 - 1, "seed")
        check_choice(self, "method", "p-eagle", "eagle3")
        check_choice(self, "partition", "prefix-once", "algorithm1", "flat")
        check_choice(self, "parallel", "ddp", "fsdp")
        check_choice(self, "loss", "soft-ce", "kl", "hard-ce")
        check_choice(self, "depth_weight", "flat", "per-depth", "gamma")
        check_choice(self, "optimizer", "muon", "adamw")
        check_choice(self, "attention", "auto", "reference", "flex", "kernel")
        self._check_window()
        self._check_together()

    @property
    def served_drafts(self) -> int:
        """K of the decoding that an evaluation runs."""
        return self.serve_k or min(self.num_depths, MAX_SPECULATIVE_TOKENS)

    def _check_together(self) -> None:
        """Settings that are right or wrong only beside others."""
        for name, counts in (("num_depths", True), ("segments", self.partition == "algorithm1")):
            if counts and getattr(self, name) > self.batch_positions:
                raise PeagleError(
                    f"{name} is {getattr(self, name)}: more than the {self.batch_positions} positions of a step, "
                    "lower it"
                )
        if self.int8 and not self.compact:
            raise PeagleError("int8 needs compact: 8-bit layers exist in the compact layout only, ask for both")
        if self.features is not None and self.cache_features:
            raise PeagleError(
                "features and cache_features exclude each other: read features from files or compute them"
            )
        if self.compile and self.partition == "algorithm1":
            raise PeagleError(
                "compile needs steps of one shape and algorithm1 has none: use prefix-once, or no compile"
            )
        if self.compile and self.checkpoint_activations:
            raise PeagleError("compile and checkpoint_activations exclude each other: choose one")

    def _check_window(self) -> None:
        """A window that holds every chain, over layers there are."""
        if self.sliding_window is None:
            if self.sliding_layers is not None:
                raise PeagleError("sliding_layers needs sliding_window: give the window's width in positions too")
            return
        longest = max(self.num_depths, self.served_drafts if self.serve_tokens else 0)
        if self.sliding_window <= longest:
            raise PeagleError(
                f"sliding_window is {self.sliding_window}: it must be above {longest}, so that a draft sees its chain"
            )
        outside = [layer for layer in self.sliding_layers or () if not 0 <= layer < self.num_layers]
        if outside:
            raise PeagleError(f"sliding_layers has {outside[0]}: layers are numbered 0 to {self.num_layers - 1}")


def _is_draft_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_SPECULATIVE_TOKENS


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
