"""Settings of the `bench` verbs, one frozen dataclass each: the only source of their defaults."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from peagle.bench.prompt_sets import SHIPPED_SETS
from peagle.checks import check_at_least, check_between, check_choice, check_positive, check_share
from peagle.config import MAX_SPECULATIVE_TOKENS
from peagle.errors import PeagleError

# A name of our own or of vLLM -> the endpoint it stands for.
BACKENDS: Mapping[str, str] = MappingProxyType(
    {
        "openai-chat": "/v1/chat/completions",
        "openai": "/v1/completions",
        "vllm": "/v1/completions",
        "sglang": "/v1/completions",
    }
)
NAMED_SETS = tuple(name.replace("_", "-") for name in SHIPPED_SETS)  # as vLLM spells names
DATASETS = ("hf", "custom", *NAMED_SETS, "spec-bench", "speed-bench", "sharegpt", "random")
# Data set -> the setting of its answers' length, beside output_len, which is for every one.
OWN_OUTPUT_LEN: Mapping[str, str] = MappingProxyType(
    {
        "hf": "hf_output_len", "custom": "custom_output_len", "sharegpt": "sharegpt_output_len",
        "spec-bench": "spec_bench_output_len", "speed-bench": "speed_bench_output_len",
    }
)  # fmt: skip
WITHOUT_EFFECT = ("tokenizer", "trust_remote_code")  # of vLLM's benchmark, for its command lines' sake
METRICS = ("ttft", "tpot", "itl", "chunk", "e2el")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
_SLOWEST = 1e-6  # requests per second times burstiness
DEFAULT_OUTPUT_LEN = 256
ACCURACY_TASKS = ("humaneval", "gsm8k")


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchServeConfig:
    """Load on an OpenAI-compatible server. Flags that `vllm bench serve` has too mean the same.

    `backend` None means chat, and completions for random tokens. `num_prompts` None is every row of the data set, of
    random tokens 1000. Lengths are tokens, `timeout` is seconds for one request. `request_rate` is requests per second,
    infinite: all at once, as far as `max_concurrency` lets them. `goodput` is written "ttft:500 tpot:20", milliseconds.
    """

    # the server
    base_url: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    backend: str | None = None
    endpoint: str | None = None
    model: str | None = None
    api_key: str | None = None
    timeout: float | None = None
    # the prompts
    dataset_name: str = "mt-bench"
    dataset_path: str | None = None
    num_prompts: int | None = None
    seed: int = 0
    shuffle: bool = True
    oversample: bool = True
    hf_subset: str | None = None
    hf_split: str | None = None
    category: str | None = None
    output_len: int | None = None
    hf_output_len: int | None = None
    custom_output_len: int | None = None
    sharegpt_output_len: int | None = None
    spec_bench_output_len: int | None = None
    speed_bench_output_len: int | None = None
    random_input_len: int = 1024
    random_output_len: int = 128
    random_vocab_size: int = 16384
    # the load
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    num_warmups: int = 0
    # each request
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    ignore_eos: bool = False
    request_seeds: bool = False
    extra_body: str | None = None
    # the report
    goodput: str | None = None
    percentile_metrics: tuple[str, ...] = METRICS
    metric_percentiles: tuple[float, ...] = (50.0, 95.0, 99.0)
    save_result: bool = False
    save_detailed: bool = False
    result_dir: str | None = None
    result_filename: str | None = None
    label: str | None = None
    disable_tqdm: bool = False
    # of vLLM, without effect
    tokenizer: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dataset_name", self.dataset_name.replace("_", "-"))  # vLLM's spec_bench
        check_choice(self, "dataset_name", *DATASETS)
        if self.backend is not None:
            check_choice(self, "backend", *BACKENDS)
        check_between(self, 1, 65535, "port")
        check_at_least(self, 1, "num_prompts", "max_concurrency", "output_len", "hf_output_len", "sharegpt_output_len")
        check_at_least(self, 1, "spec_bench_output_len", "speed_bench_output_len", "random_input_len")
        check_at_least(self, 1, "random_output_len")
        check_at_least(self, 2, "random_vocab_size")
        check_at_least(self, 0, "num_warmups", "seed")
        check_positive(self, "timeout", "burstiness")
        check_between(self, 0, 100, "temperature")
        check_share(self, "(0, 1]", "top_p")
        check_share(self, "[0, 1]", "min_p")
        self._check_custom_length()
        self._check_own_length()
        self._check_rest()

    def _check_custom_length(self) -> None:
        """-1 is vLLM's way to ask for the lengths that the file's rows give."""
        length = self.custom_output_len
        if length is not None and length < 1 and length != -1:
            raise PeagleError(f"custom_output_len is {length}: give at least 1, or -1 for each row's output_tokens")

    def _check_own_length(self) -> None:
        """A length of another data set would be passed over in silence."""
        own = "random_output_len" if self.dataset_name == "random" else OWN_OUTPUT_LEN.get(self.dataset_name)
        for dataset, name in OWN_OUTPUT_LEN.items():
            if name != own and getattr(self, name) is not None:
                right = "" if own is None else f" or --{own.replace('_', '-')}"
                raise PeagleError(
                    f"{name} is for the data set {dataset}, not for {self.dataset_name}: give --output-len{right}"
                )

    def _check_rest(self) -> None:
        if self.endpoint is not None and not self.endpoint.startswith("/"):
            raise PeagleError(f"endpoint is {self.endpoint!r}: it is a path and begins with /, as {BACKENDS['openai']}")
        if not self.request_rate > 0:
            raise PeagleError(f"request_rate is {self.request_rate}: give requests per second above 0, or inf")
        if self.request_rate * self.burstiness < _SLOWEST:
            raise PeagleError(
                f"request_rate {self.request_rate} with burstiness {self.burstiness} leaves years between requests: "
                f"their product must be at least {_SLOWEST}"
            )
        if self.top_k is not None and self.top_k < -1:
            raise PeagleError(f"top_k is {self.top_k}: give 1 or more, or 0 or -1 for off")
        for metric in self.percentile_metrics:
            if metric not in METRICS:
                raise PeagleError(f"percentile_metrics has {metric!r}: choose among {', '.join(METRICS)}")
        outside = [share for share in self.metric_percentiles if not 0 <= share <= 100]
        if outside:
            raise PeagleError(f"metric_percentiles has {outside[0]}: each must be in 0 .. 100")
        if self.base_url is not None and not self.base_url.startswith(("http://", "https://")):
            raise PeagleError(f"base_url is {self.base_url!r}: it must begin with http:// or https://")
        self.slos()

    def slos(self) -> dict[str, float]:
        """The limits of `goodput`: name of a figure -> milliseconds."""
        limits: dict[str, float] = {}
        for part in (self.goodput or "").replace(",", " ").split():
            name, colon, value = part.partition(":")
            if name in limits:
                raise PeagleError(f"goodput has {name} twice: give one limit")
            try:
                limits[name] = float(value)
            except ValueError:
                colon = ""
            if not colon or name not in GOODPUT_METRICS or not limits[name] > 0:
                raise PeagleError(
                    f"goodput has {part!r}: write NAME:MILLISECONDS with a name of {', '.join(GOODPUT_METRICS)}"
                )
        return limits

    @property
    def server(self) -> str:
        """URL of the server, without the path of the API and without a slash."""
        host = f"[{self.host}]" if ":" in self.host and not self.host.startswith("[") else self.host  # IPv6
        url = self.base_url or f"http://{host}:{self.port}"
        return url.rstrip("/").removesuffix("/v1")

    @property
    def key(self) -> str | None:
        """The API key: given, or of the environment."""
        return self.api_key or os.environ.get("OPENAI_API_KEY") or None

    @property
    def path(self) -> str:
        """Path of the endpoint."""
        backend = self.backend or ("openai" if self.dataset_name == "random" else "openai-chat")
        return self.endpoint or BACKENDS[backend]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """What `peagle eval` measures of a head. `sets` are names or prompts files, `limit` is prompts of each set.

    `lossless_prompts` are answered without drafts too, spread over the sets, and compared token by token; 0: none.
    `accuracy` names tasks whose answers are marked, in up to `accuracy_tokens` tokens; marking HumanEval runs programs
    that the model wrote, which `run_code` has to allow.
    """

    sets: tuple[str, ...] = ("mt_bench", "humaneval", "gsm8k", "mbpp")
    limit: int | None = None
    k: tuple[int, ...] = (3, 5, 7)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_tokens: int = 256
    seed: int = 0
    lossless_prompts: int = 32
    accuracy: tuple[str, ...] = ()
    accuracy_tokens: int = 512
    run_code: bool = False
    max_num_seqs: int = 256
    draft_lm_head: str = "auto"
    kernels: str = "auto"
    dtype: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        check_at_least(self, 1, "limit", "max_tokens", "accuracy_tokens", "max_num_seqs")
        check_choice(self, "draft_lm_head", "auto", "int8")
        check_at_least(self, 0, "lossless_prompts", "seed")
        for name in ("k", "temperatures"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise PeagleError(f"{name} are {list(values)}: give at least one, each only once")
        hot = [t for t in self.temperatures if not 0 <= t <= 100]
        if hot:
            raise PeagleError(f"temperatures has {hot[0]}: each must be in 0 .. 100")
        outside = [k for k in self.k if not 1 <= k <= MAX_SPECULATIVE_TOKENS]
        if outside:
            raise PeagleError(f"k has {outside[0]}: each must be a whole number in 1 .. {MAX_SPECULATIVE_TOKENS}")
        for task in self.accuracy:
            if task not in ACCURACY_TASKS:
                raise PeagleError(f"accuracy has {task!r}: choose among {', '.join(ACCURACY_TASKS)}")
        if "humaneval" in self.accuracy and not self.run_code:
            raise PeagleError("accuracy humaneval runs programs that the model wrote: add --run-code to allow it")
        if not self.prompt_sets and not self.accuracy:
            raise PeagleError("sets is 'none' and no accuracy is asked for, so nothing is measured: name one of them")

    @property
    def prompt_sets(self) -> tuple[str, ...]:
        """The sets to measure acceptance on; `none` is how the command line says that there are none."""
        return () if self.sets == ("none",) else self.sets
