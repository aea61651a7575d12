"""`LLM`: load a target and a head, generate. The loop around `SpeculativeStep` that users call."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from peagle.config import EngineConfig, SpeculativeConfig
from peagle.devices import resolve_device, resolve_dtype
from peagle.drafters.checkpoint import load_drafter
from peagle.drafters.eagle3 import DrafterConfig, Eagle3Drafter
from peagle.engine.batch import Slots, build_batch
from peagle.engine.kv_cache import BlockPool, PagedCache
from peagle.engine.memory import num_kv_blocks
from peagle.engine.request import Request, RequestOutput
from peagle.engine.scheduler import Scheduled, Scheduler
from peagle.engine.step import DraftSide, SpeculativeStep, StepResult
from peagle.engine.text import TextStream
from peagle.errors import PeagleError
from peagle.kernels.backend import can_run_triton
from peagle.models.layers import use_kernels
from peagle.models.packing import pack_linears
from peagle.models.target import Target, load_target
from peagle.models.tokenizer import encode, render_chat
from peagle.sampling import SamplingParams

OnDelta = Callable[[int, str], None]
OnFinish = Callable[[int, RequestOutput], None]


class LLM:
    """A target model, optionally with a P-EAGLE or EAGLE-3 head, ready to generate.

    `model` is a local Hugging Face directory, a `.gguf` file, a Hub id or `smollm2-135m`; `speculative_config` takes
    vLLM's keys. The output is the same with and without speculation, whatever the head, K or the batch.
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
        attention: str = "auto",
        load_format: str = "auto",
        kernels: str = "torch",
        seed: int = 0,
    ) -> None:
        config = EngineConfig(
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            attention=attention,
            load_format=load_format,
            kernels=kernels,
            seed=seed,
        )
        torch_device = resolve_device(config.device)
        torch_dtype = resolve_dtype(config.dtype, torch_device)
        if isinstance(speculative_config, dict):
            speculative_config = SpeculativeConfig.from_mapping(speculative_config)
        target = load_target(model, dtype=torch_dtype, device=torch_device, load_format=config.load_format)
        drafter, num_drafts = None, 0
        if speculative_config is not None:
            num_drafts = speculative_config.num_speculative_tokens
            drafter = load_drafter(
                speculative_config.model,
                target.model,
                target.spec,
                dtype=torch_dtype,
                device=torch_device,
                target_name=target.name,
            )
            _check_kind(speculative_config, drafter.config)
        self._build(target, drafter, num_drafts, config, torch_device)

    @classmethod
    def from_parts(
        cls,
        target: Target,
        drafter: Eagle3Drafter | None,
        num_speculative_tokens: int,
        config: EngineConfig,
        *,
        pack: bool = True,
    ) -> "LLM":
        """Assemble from a loaded target and drafter, both already on the device.

        `pack` replaces their linear layers by packed ones on the CPU; without it both modules are only read.
        """
        llm = cls.__new__(cls)
        device = next(target.model.parameters()).device
        llm._build(target, drafter, num_speculative_tokens, config, device, pack=pack)
        return llm

    def _build(
        self,
        target: Target,
        drafter: Eagle3Drafter | None,
        num_drafts: int,
        config: EngineConfig,
        device: torch.device,
        *,
        pack: bool = True,
    ) -> None:
        for name, other in (("attention", "auto"), ("kernels", "torch")):
            if getattr(config, name) == "triton" and not can_run_triton(device):
                raise PeagleError(
                    f"{name} is 'triton': it needs CUDA and the triton package, not {device}; use {other}"
                )
        spec = target.spec
        self.target, self.drafter, self.tokenizer = target, drafter, target.tokenizer
        self.num_speculative_tokens = num_drafts
        self.max_model_len = self._check_max_model_len(config.max_model_len, spec.max_position_embeddings)
        self._rng = np.random.default_rng(config.seed)
        self._num_drafts = num_drafts
        dtype = target.model.embed_tokens.weight.dtype
        for module in (target.model, drafter):
            if module is None:
                continue
            use_kernels(module, config.kernels)
            if pack and device.type == "cpu":
                pack_linears(module)
        blocks = num_kv_blocks(config, self.max_model_len, spec, drafter.config if drafter else None, dtype, device)
        slots_total = blocks * config.block_size
        cache = PagedCache(
            spec.num_layers,
            spec.num_kv_heads,
            spec.head_dim,
            slots_total,
            dtype=dtype,
            device=device,
            kernels=config.kernels,
        )
        draft_side = None
        if drafter is not None:
            c = drafter.config
            _check_windows(c.windows, num_drafts)
            draft_side = DraftSide.of(
                drafter,
                PagedCache(
                    c.num_layers,
                    c.num_kv_heads,
                    c.head_dim,
                    slots_total,
                    dtype=dtype,
                    device=device,
                    windows=c.windows,
                    kernels=config.kernels,
                ),
            )
        self._pool = BlockPool(blocks)
        max_blocks = -(-self.max_model_len // config.block_size)
        self._slots = Slots(config.max_num_seqs, num_drafts, max_blocks)
        self._scheduler = Scheduler(
            self._pool, config.max_num_seqs, config.max_num_batched_tokens, config.block_size, self.max_model_len
        )
        self._step = SpeculativeStep(
            target.model,
            cache,
            draft_side,
            slots=self._slots,
            block_size=config.block_size,
            max_model_len=self.max_model_len,
            device=device,
            attention=config.attention,
            kernels=config.kernels,
        )

    @staticmethod
    def _check_max_model_len(asked: int | None, context: int) -> int:
        if asked is not None and asked > context:
            raise PeagleError(f"max_model_len is {asked}: it must be at most the target's context, {context} tokens")
        return asked or context

    def set_speculation(self, enabled: bool) -> None:
        """Turn drafting on or off between calls of `generate`; off, the same engine decodes one token a step."""
        if enabled and self.drafter is None:
            raise PeagleError("speculation cannot be turned on: the engine was loaded without a speculative_config")
        self._num_drafts = self.num_speculative_tokens if enabled else 0

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        on_delta: OnDelta | None = None,
        on_finish: OnFinish | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt (text, or token ids taken as they are); outputs in the order of the prompts.

        `on_delta(index, text)` receives text as it is decided, `on_finish(index, output)` each finished request. An
        exception from a callback, Ctrl-C included, frees all requests before it propagates.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise PeagleError(
                f"got {len(prompts)} prompts and {len(each)} sampling params: give one, or one per prompt"
            )
        requests = [self._request(i, p, s, on_delta) for i, (p, s) in enumerate(zip(prompts, each, strict=True))]
        self._scheduler.waiting.extend(requests)
        outputs: dict[int, RequestOutput] = {}
        try:
            while len(outputs) < len(requests):
                for request in self._run_step(on_delta):
                    outputs[request.index] = output = request.output(self.tokenizer)
                    self._last_delta(request, on_delta)
                    if on_finish is not None:
                        on_finish(request.index, output)
        finally:
            self._abort_all()
        return [outputs[i] for i in range(len(requests))]

    def chat(
        self,
        conversations: Sequence[list[dict[str, str]]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        on_delta: OnDelta | None = None,
    ) -> list[RequestOutput]:
        """Answer each conversation (OpenAI-style messages) through the model's own chat template."""
        prompts = [render_chat(self.tokenizer, messages, add_generation_prompt=True) for messages in conversations]
        return self.generate(prompts, params, on_delta=on_delta)

    def _request(
        self, index: int, prompt: str | Sequence[int], params: SamplingParams, on_delta: OnDelta | None
    ) -> Request:
        is_text = isinstance(prompt, str)
        ids = encode(self.tokenizer, prompt) if isinstance(prompt, str) else [int(i) for i in prompt]
        room = self.max_model_len - len(ids)
        vocab = self.target.spec.vocab_size
        if not ids:
            raise PeagleError(f"prompt {index} is empty: give at least one token")
        if room < 1:
            raise PeagleError(
                f"prompt {index} has {len(ids)} tokens: the context of {self.max_model_len} leaves no room for an "
                "answer; shorten it"
            )
        if not is_text and not all(0 <= i < vocab for i in ids):
            raise PeagleError(f"prompt {index} holds a token id outside 0 .. {vocab - 1}")
        eos = () if params.ignore_eos else self.target.spec.eos_token_ids
        request = Request(
            index=index,
            prompt=prompt if isinstance(prompt, str) else "",
            prompt_ids=ids,
            params=params,
            seed=params.seed if params.seed is not None else int(self._rng.integers(2**63)),
            stop_ids=frozenset(eos) | frozenset(params.stop_token_ids),
            max_tokens=min(params.max_tokens, room),
            stream=TextStream(self.tokenizer, params.stop) if params.stop or on_delta is not None else None,
        )
        if self._scheduler.blocks_needed(request, self._reserve()) > self._pool.num_blocks:
            raise PeagleError(
                f"prompt {index} with {len(ids)} tokens and max_tokens {request.max_tokens} needs more KV cache than "
                "there is: lower max_tokens or max_model_len"
            )
        return request

    def _reserve(self) -> int:
        return 2 * self._num_drafts

    def _run_step(self, on_delta: OnDelta | None) -> list[Request]:
        """One step; returns the requests it finished."""
        scheduled = self._scheduler.schedule(self._num_drafts + 1, self._reserve())
        for s in scheduled:
            if not s.is_decode and s.request.started == 0.0:
                self._start(s.request)
        result = self._step.run(build_batch(scheduled, self._slots, self._num_drafts))
        self._advance(scheduled, result)
        finished = [s.request for s in scheduled if s.request.finish_reason is not None]
        if on_delta is not None:
            for s in scheduled:
                if s.request.stream is not None and (piece := s.request.stream.take()):
                    on_delta(s.request.index, piece)
        self._scheduler.drop_finished()
        return finished

    def _start(self, request: Request) -> None:
        request.started = time.perf_counter()
        slot, slots = request.slot, self._slots
        slots.block_tables[slot] = 0
        slots.block_tables[slot, : len(request.blocks)] = request.blocks
        slots.seed[slot], slots.temperature[slot] = request.seed, request.params.temperature
        slots.top_k[slot], slots.top_p[slot] = max(request.params.top_k, 0), request.params.top_p

    def _advance(self, scheduled: list[Scheduled], result: StepResult) -> None:
        """Hand each request its tokens and remember what the next step starts from."""
        accepted_B, tokens_BV, now = result.accepted_B.tolist(), result.tokens_BV.tolist(), time.perf_counter()
        for s, accepted, tokens in zip(scheduled, accepted_B, tokens_BV, strict=True):
            request = s.request
            request.num_computed += accepted + 1 if s.is_decode else s.num_rows
            if request.in_prompt:
                continue
            first_index = len(request.output_ids)
            kept = request.emit(tokens[: accepted + 1] if s.is_decode else tokens[:1])
            if s.is_decode and self._num_drafts > 0:
                request.record_round(first_index, min(accepted, kept), self._num_drafts)
            if request.finish_reason is not None:
                request.ended = now
        slot_B = np.array([s.request.slot for s in scheduled], dtype=np.int64)
        self._slots.last_token[slot_B] = result.tokens_BV[np.arange(len(slot_B)), result.accepted_B]
        if self._num_drafts > 0:
            self._slots.drafts[slot_B] = result.drafts_BK

    def _last_delta(self, request: Request, on_delta: OnDelta | None) -> None:
        if on_delta is not None and request.stream is not None and (piece := request.stream.take(final=True)):
            on_delta(request.index, piece)

    def _abort_all(self) -> None:
        for request in self._scheduler.running:
            request.finish_reason = request.finish_reason or "abort"
        self._scheduler.drop_finished()
        self._scheduler.waiting.clear()


def _check_windows(windows: Sequence[int | None], num_drafts: int) -> None:
    """PeagleError when a row of a draft would not see all of its chain, as it did in training."""
    narrow = [window for window in windows if window is not None and window <= num_drafts]
    if narrow:
        raise PeagleError(
            f"num_speculative_tokens is {num_drafts}: the head's sliding window of {narrow[0]} positions allows at "
            f"most {narrow[0] - 1}"
        )


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
