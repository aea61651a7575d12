"""What an engine does before it serves: compile and capture, so that no request has to wait for that."""

import logging
from collections.abc import Callable, Sequence

import torch

from peagle.engine.engine import LLM
from peagle.engine.graphs import COMMON_MODES, EVERYTHING, bucket_sizes
from peagle.engine.request import Request
from peagle.engine.slots import SamplingMode
from peagle.engine.speculation import TableK, draft_counts
from peagle.sampling import SamplingParams
from peagle.structured.matcher import AnyText

_log = logging.getLogger(__name__)

# Tokens of prompts whose passes differ in how attention is cut into tiles, or in who multiplies: there is a kernel for
# few rows, and one for more.
_PROMPT_LENGTHS = (2, 4, 10, 40, 120, 400)
_EXPERT_ROWS = 1024  # from there on experts have higher tiles

MakeRequest = Callable[[Sequence[int], SamplingParams], Request]
_GREEDY = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, seed=0)
_ASKS_FOR_ALL = SamplingParams(
    max_tokens=2, temperature=1.0, top_p=0.9, presence_penalty=0.1, logprobs=1, prompt_logprobs=1, show_drafts=True,
    ignore_eos=True, seed=0,
)  # fmt: skip


class WarmUp:
    """For the thread that owns the core of `llm`. `kinds` "basic" captures greedy and drawn steps alone, "all" those
    with filters, penalties, grammars and log-probabilities too, or a step that stands in for them."""

    def __init__(self, llm: LLM, make_request: MakeRequest, kinds: str = "all") -> None:
        spec = llm.target.spec
        self._core, self._vocab_size, self._make_request = llm.core, spec.vocab_size, make_request
        self._long = (_EXPERT_ROWS,) if spec.moe is not None else ()
        self._modes: Sequence[SamplingMode] = COMMON_MODES if kinds == "all" else COMMON_MODES[:2]

    def run(self, must_end: Callable[[], bool]) -> None:
        """Compile and capture, on a GPU, as long as it must not end; then a request, as the proof that requests
        succeed."""
        if self._core.device.type == "cuda":
            before = torch.cuda.mem_get_info(self._core.device)[0]
            self._capture(must_end)
            if must_end():
                return
            self._capture_page()
            self._compile_lengths()
            for shape in self._core.warm_up_prompts():
                _log.info("warming up: prompts of up to %d tokens, %d at once", shape.rows, shape.requests - 1)
                if must_end():
                    return
            for rows in self._core.warm_up_whole_prompts():
                _log.info("warming up: attention of a prompt of up to %d tokens", rows)
                if must_end():
                    return
            taken = before - torch.cuda.mem_get_info(self._core.device)[0]
            _log.info("%d graphs are captured, in %.2f GiB", self._core.num_graphs, taken / 2**30)
            if EVERYTHING in self._modes:
                self._compile_all_kinds()
                self._core.settle()
        self._answer(self._make_request([0], _GREEDY))

    def _capture(self, must_end: Callable[[], bool]) -> None:
        """Steps of every size, every K that may be chosen, and as many modes as there is room for."""
        core, policy = self._core, self._core.policy
        most = core.max_num_seqs
        table = {policy.choose(size) for size in range(1, most + 1)} if isinstance(policy, TableK) else None
        drafts = sorted(table or draft_counts(policy.max_drafts))
        self._modes = core.modes_with_room(self._modes, len(drafts))
        total = len(self._modes) * len(drafts) * len(bucket_sizes(most))
        for number, (size, num_drafts) in enumerate(core.warm_up(drafts, self._modes), 1):
            _log.info("warming up, %d of %d: steps of %d requests with %d drafts", number, total, size, num_drafts)
            if must_end():
                return

    def _capture_page(self) -> None:
        """The steps of one request alone that is traced, with drafts and without, as the page asks for them."""
        for num_drafts in {0, self._core.policy.max_drafts}:
            for drawn in (False, True):
                self._core.run_padding(1, num_drafts, SamplingMode(drawn=drawn, shows_drafts=True))

    def _compile_lengths(self) -> None:
        """Run prompts of every length that has kernels of its own: their first request would wait for them."""
        most = self._core.max_model_len - _GREEDY.max_tokens
        for length in {min(length, most) for length in (*_PROMPT_LENGTHS, *self._long)}:
            token = length % self._vocab_size  # not that of another, whose keys are in the cache
            self._answer(self._make_request([token] * length, _GREEDY))

    def _compile_all_kinds(self) -> None:
        """What only a prompt asks for, and what passes over prompts do that are not captured."""
        request = self._make_request([0, 0], _ASKS_FOR_ALL)
        self._core.keep_masks(self._vocab_size)
        request.matcher = AnyText()
        self._answer(request)

    def _answer(self, request: Request) -> None:
        self._core.add(request)
        while self._core.has_work:
            self._core.step()
