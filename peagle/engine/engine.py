"""`LLM`: load a target and a head, generate. What users call, around `EngineCore`."""

import logging
import operator
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from peagle.config import MAX_SPECULATIVE_TOKENS, EngineConfig, SpeculativeConfig
from peagle.devices import resolve_dtype, resolve_engine_device
from peagle.drafters.checkpoint import load_drafter, local_head, peek_head
from peagle.drafters.draft_pass import DraftSavings
from peagle.drafters.eagle3 import DrafterConfig, Eagle3Drafter
from peagle.engine.build import build_core, check_max_model_len, resolve_kernels
from peagle.engine.core import EngineCore
from peagle.engine.costs import measure_costs
from peagle.engine.request import Request, RequestOutput
from peagle.engine.speculation import FixedK, check_depth, choose_policy, draft_counts, load_k_table, trained_depth
from peagle.engine.text import MeasuredStream, TextStream
from peagle.errors import PeagleError
from peagle.models.spec import ModelSpec
from peagle.models.target import Target, load_target
from peagle.models.tokenizer import encode, render_chat
from peagle.sampling import SamplingParams
from peagle.structured.grammars import Grammars
from peagle.structured.vocabulary import Vocabulary

_log = logging.getLogger(__name__)

OnDelta = Callable[[int, str], None]
OnFinish = Callable[[int, RequestOutput], None]


class LLM:
    """A target model, optionally with a P-EAGLE or EAGLE-3 head, ready to generate.

    `model` is a local Hugging Face directory, a `.gguf` file, a Hub id or `smollm2-135m`; `speculative_config` takes
    vLLM's keys, the other settings are those of `EngineConfig`. The output is the same with and without speculation,
    whatever the head, K or the batch.
    """

    def __init__(
        self,
        model: str,
        *,
        speculative_config: SpeculativeConfig | dict[str, Any] | None = None,
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 8192,
        block_size: int = 16,
        num_kv_blocks: int | None = None,
        gpu_memory_utilization: float = 0.9,
        enable_prefix_caching: bool = True,
        graphs: bool = True,
        prompt_graphs: bool = True,
        async_scheduling: bool = True,
        attention: str = "auto",
        load_format: str = "auto",
        unpack_experts: bool = False,
        draft_lm_head: str = "auto",
        kernels: str = "auto",
        seed: int = 0,
    ) -> None:
        config = EngineConfig(
            dtype=dtype, device=device, max_model_len=max_model_len, max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens, block_size=block_size, num_kv_blocks=num_kv_blocks,
            gpu_memory_utilization=gpu_memory_utilization, enable_prefix_caching=enable_prefix_caching, graphs=graphs,
            prompt_graphs=prompt_graphs, async_scheduling=async_scheduling, attention=attention,
            load_format=load_format, unpack_experts=unpack_experts, draft_lm_head=draft_lm_head, kernels=kernels,
            seed=seed,
        )  # fmt: skip
        if isinstance(speculative_config, dict):
            speculative_config = SpeculativeConfig.from_mapping(speculative_config)
        target = _load_checked(model, config, speculative_config)
        if speculative_config is None:
            self._assemble(target, None, build_core(target, None, 0, config), 0, config.seed)
            return
        drafter, speculation = _load_head(speculative_config, target)
        most_drafts = speculation.max_drafts
        core = build_core(target, drafter, most_drafts, config, synthetic_rates=speculation.synthetic_rates)
        self._assemble(target, drafter, core, most_drafts, config.seed)
        self._policy = choose_policy(speculation, lambda: measure_costs(self.core, draft_counts(most_drafts)))
        self.core.policy = self._policy

    @classmethod
    def from_parts(
        cls,
        target: Target,
        drafter: Eagle3Drafter | None,
        num_speculative_tokens: int,
        config: EngineConfig,
        *,
        pack: bool = True,
        synthetic_rates: Sequence[float] | None = None,
        savings: DraftSavings | None = None,
    ) -> "LLM":
        """Assemble from a loaded target and drafter, both already on the device.

        `pack` replaces their linear layers by packed ones on the CPU; without it both modules are only read.
        `synthetic_rates`: SYNTHETIC acceptance, the chance of each draft once those before it were kept. `savings` says
        which work the drafter's pass leaves out, None all that can be; no token depends on it.
        """
        drafts = 0 if drafter is None else num_speculative_tokens
        if not isinstance(drafts, int) or not 0 <= drafts <= MAX_SPECULATIVE_TOKENS:
            raise PeagleError(f"num_speculative_tokens is {drafts!r}: it must be 0 to {MAX_SPECULATIVE_TOKENS}")
        if synthetic_rates is not None and not (
            len(synthetic_rates) == drafts and all(0 <= rate <= 1 for rate in synthetic_rates)
        ):
            raise PeagleError(f"synthetic_rates is {synthetic_rates!r}: give {drafts} numbers in 0 .. 1, one a draft")
        core = build_core(target, drafter, drafts, config, pack=pack, synthetic_rates=synthetic_rates, savings=savings)
        llm = cls.__new__(cls)
        llm._assemble(target, drafter, core, drafts, config.seed)
        return llm

    def _assemble(
        self, target: Target, drafter: Eagle3Drafter | None, core: EngineCore, most_drafts: int, seed: int
    ) -> None:
        self.target, self.drafter, self.tokenizer = target, drafter, target.tokenizer
        self.core, self.max_model_len = core, core.max_model_len
        self.num_speculative_tokens = most_drafts
        self._policy = core.policy
        self._rng = np.random.default_rng(seed)
        self._generating = threading.Lock()

    @cached_property
    def grammars(self) -> Grammars:
        """What compiles `structured_outputs`. Raises PeagleError without the extra `peagle[structured]`."""
        spec = self.target.spec
        return Grammars(Vocabulary.of(self.tokenizer, spec.vocab_size, spec.eos_token_ids))

    def set_speculation(self, enabled: bool) -> None:
        """Turn drafting on or off between calls of `generate`; off, the same engine decodes one token a step."""
        if enabled and self.drafter is None:
            raise PeagleError("speculation cannot be turned on: the engine was loaded without a speculative_config")
        self.core.policy = self._policy if enabled else FixedK(0)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        on_delta: OnDelta | None = None,
        on_finish: OnFinish | None = None,
        marks: Mapping[int, str] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; outputs in the order of the prompts. Text gets the special tokens that the tokenizer
        adds by itself, such as a BOS, unless `render_chat` wrote it; token ids are taken as they are.

        A string is one prompt.

        `on_delta(index, text)` receives text as it is decided, `on_finish(index, output)` each finished request. An
        exception from a callback, Ctrl-C included, frees all requests before it propagates. With `on_delta`, `marks`
        are what stands for some special tokens in the text.
        """
        if isinstance(prompts, str):
            prompts = [prompts]
        if self.core.has_work or not self._generating.acquire(blocking=False):
            raise PeagleError("generate was called while requests are running: wait for them, or use `core`")
        try:
            return self._generate(prompts, params, on_delta, on_finish, marks)
        finally:
            self._generating.release()

    def _generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        on_delta: OnDelta | None,
        on_finish: OnFinish | None,
        marks: Mapping[int, str] | None,
    ) -> list[RequestOutput]:
        for name, value in (("prompts", prompts), ("params", params)):
            if not isinstance(value, Iterable | SamplingParams):
                raise PeagleError(f"generate got {value!r:.60} for {name}: give one, or a list of them")
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise PeagleError(
                f"got {len(prompts)} prompts and {len(each)} sampling params: give one, or one per prompt"
            )
        streamed = on_delta is not None
        pairs = enumerate(zip(prompts, each, strict=True))
        requests = [self.make_request(p, s, index=i, streamed=streamed, marks=marks) for i, (p, s) in pairs]
        outputs: dict[int, RequestOutput] = {}
        try:
            for request in requests:
                self.core.add(request)
            while self.core.has_work:
                for request in self.core.step():
                    finished = request.finish_reason is not None
                    if finished:
                        outputs[request.index] = request.output(self.tokenizer)
                    if on_delta is not None and (piece := _new_text(request, final=finished)):
                        on_delta(request.index, piece)
                    if finished and on_finish is not None:
                        on_finish(request.index, outputs[request.index])
        finally:
            self.core.abort_all()
        return [outputs.get(request.index) or request.output(self.tokenizer) for request in requests]

    def chat(
        self,
        conversations: Sequence[list[dict[str, str]]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        on_delta: OnDelta | None = None,
        marks: Mapping[int, str] | None = None,
    ) -> list[RequestOutput]:
        """Answer each conversation (OpenAI-style messages) through the model's own chat template."""
        prompts = [render_chat(self.tokenizer, messages, add_generation_prompt=True) for messages in conversations]
        return self.generate(prompts, params, on_delta=on_delta, marks=marks)

    def make_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        index: int = 0,
        streamed: bool = False,
        marks: Mapping[int, str] | None = None,
    ) -> Request:
        """A request for `core.add`, checked: it fits context and cache. `streamed` keeps its text up to date, with
        `marks` in the place of some special tokens."""
        if not isinstance(params, SamplingParams):
            raise PeagleError(f"the sampling params of prompt {index} are {params!r}: give a SamplingParams")
        vocab, eos = self.target.spec.vocab_size, () if params.ignore_eos else self.target.spec.eos_token_ids
        ids = self._prompt_ids(prompt, index)
        params.check_vocabulary(vocab)
        request = Request(
            index=index,
            prompt=prompt if isinstance(prompt, str) else "",
            prompt_ids=ids,
            params=params,
            seed=params.seed if params.seed is not None else int(self._rng.integers(2**63)),
            stop_ids=frozenset(eos) | frozenset(params.stop_token_ids),
            max_tokens=min(params.max_tokens, self.max_model_len - len(ids)),
            stream=_stream(self.tokenizer, params, streamed, marks or {}),
        )
        if params.penalised:
            self.core.keep_history(vocab)
        if params.structured_outputs is not None:
            if self.core.synthetic is not None:
                raise PeagleError("structured_outputs needs real acceptance: leave out the synthetic one")
            request.matcher = self.grammars.matcher(params.structured_outputs)
            self.core.keep_masks(vocab)
        return request

    def _prompt_ids(self, prompt: str | Sequence[int], index: int) -> list[int]:
        """The tokens of a prompt: some, of the target's vocabulary, with room for an answer. Raises PeagleError."""
        vocab, is_text = self.target.spec.vocab_size, isinstance(prompt, str)
        ids = encode(self.tokenizer, prompt) if isinstance(prompt, str) else _token_ids(prompt, index)
        if not ids:
            raise PeagleError(f"prompt {index} is empty: give at least one token")
        if len(ids) >= self.max_model_len:
            remedy = self.core.context_remedy
            limit, or_raise = ("KV cache", f" or {remedy}") if remedy else ("context", "")
            raise PeagleError(
                f"prompt {index} has {len(ids)} tokens: the {limit} of {self.max_model_len} leaves no room for an "
                f"answer; shorten it{or_raise}"
            )
        if not is_text and not all(0 <= i < vocab for i in ids):
            raise PeagleError(f"prompt {index} holds a token id outside 0 .. {vocab - 1}")
        return ids


def _token_ids(prompt: object, index: int) -> list[int]:
    """A prompt of token ids as a list of ints, numpy's included."""
    try:
        return [operator.index(i) for i in prompt]  # type: ignore[attr-defined]
    except TypeError:
        raise PeagleError(f"prompt {index} is {prompt!r:.60}: give text, or a list of whole numbers") from None


def _stream(tokenizer: Any, params: SamplingParams, streamed: bool, marks: Mapping[int, str]) -> TextStream | None:
    """What keeps a request's text up to date, where someone needs that before the end."""
    if params.logprobs is not None:
        return MeasuredStream(tokenizer, params.stop, marks, keeps_stop=params.include_stop_str_in_output)
    if not (params.stop or streamed):
        return None
    return TextStream(tokenizer, params.stop, marks, keeps_stop=params.include_stop_str_in_output)


def _new_text(request: Request, *, final: bool) -> str:
    return request.stream.take(final=final) if request.stream is not None else ""


def _load_checked(model: str, config: EngineConfig, speculation: SpeculativeConfig | None) -> Target:
    """The target, once all is checked that can be before its weights are read, which takes a while."""
    device = resolve_engine_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    resolve_kernels(config, device)
    if speculation is not None:
        local_head(speculation.model)
        if speculation.k_table is not None:
            load_k_table(speculation.k_table)

    def check(spec: ModelSpec) -> None:
        check_max_model_len(config.max_model_len, spec)
        if speculation is not None and (head := peek_head(speculation.model, spec)) is not None:
            _check_kind(speculation, head)

    return load_target(
        model,
        dtype=dtype,
        device=device,
        load_format=config.load_format,
        unpack_experts=config.unpack_experts or config.kernels == "torch",
        check=check,
    )


def _load_head(asked: SpeculativeConfig, target: Target) -> tuple[Eagle3Drafter, SpeculativeConfig]:
    """The head, and the config with K settled for it. A warning is logged if K is beyond its trained depth."""
    weight = target.model.embed_tokens.weight
    drafter = load_drafter(asked.model, target.model, dtype=weight.dtype, device=weight.device, target_name=target.name)
    _check_kind(asked, drafter.config)
    if asked.rejection_sample_method == "synthetic":
        _log.warning("SYNTHETIC acceptance: drafts are kept by chance, the tokens mean nothing; for benchmarks only")
    depth = trained_depth(asked.model)
    settled = asked.for_head(depth)
    check_depth(settled.max_drafts, depth)
    return drafter, settled


def _check_kind(asked: SpeculativeConfig, head: DrafterConfig) -> None:
    """Raise PeagleError when the speculative config asks for the other way to draft than the head's."""
    way = "drafts all tokens in one pass" if head.parallel else "drafts one token a pass"
    if asked.parallel_drafting is not None and asked.parallel_drafting != head.parallel:
        raise PeagleError(
            f"parallel_drafting is {str(asked.parallel_drafting).lower()}, but {asked.model} is a {head.kind} head, "
            f"which {way}: set it to {str(head.parallel).lower()}, or leave it out"
        )
    if asked.method == "peagle" and not head.parallel:
        raise PeagleError(f"method is 'peagle', but {asked.model} is a {head.kind} head, which {way}: use 'eagle3'")
