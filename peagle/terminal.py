"""What `generate` and `chat` print: answers streamed in prompt order, a line of figures each, or JSON lines."""

import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from peagle.exits import write_utf8
from peagle.models.tokenizer import chat_prompt
from peagle.prompt_file import PromptRow

if TYPE_CHECKING:
    from peagle.engine.engine import LLM
    from peagle.engine.request import RequestOutput
    from peagle.sampling import SamplingParams

LINE_ENDS = "\u0085\u2028\u2029"  # json leaves them as they are, str.splitlines and others cut at them


def figures(output: "RequestOutput") -> str:
    """One line about an answer: tokens, speed, and what the drafts brought."""
    line = f"{len(output.token_ids)} tokens, {output.tokens_per_second:.1f} tok/s"
    if output.stats.num_draft_tokens:
        line += f", acceptance length {output.stats.acceptance_length:.2f}"
    return f"{line}, finished: {output.finish_reason}"


def json_line(output: "RequestOutput") -> str:
    """The machine-readable record of one answer, on one line for every reader."""
    stats = output.stats
    record = {
        "prompt": output.prompt,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "num_rounds": stats.num_rounds,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "acceptance_length": round(stats.acceptance_length, 4),
        "accepted_per_position": stats.accepted_per_position,
        "tokens_per_second": round(output.tokens_per_second, 2),
    }
    line = json.dumps(record, ensure_ascii=False)
    for character in LINE_ENDS:
        line = line.replace(character, f"\\u{ord(character):04x}")
    return line


class OrderedAnswers:
    """Reports answers in prompt order while the engine works on many at once.

    The first unfinished answer is streamed through `write` as it grows; later ones wait in memory until their turn.
    `finished` is called once per answer, after its last text.
    """

    def __init__(
        self, count: int, write: Callable[[str], object], finished: Callable[["RequestOutput"], object]
    ) -> None:
        self._write, self._report = write, finished
        self._waiting = [""] * count
        self._outputs: list[RequestOutput | None] = [None] * count
        self._current = 0

    def on_delta(self, index: int, text: str) -> None:
        """Take new text of answer `index`."""
        if index == self._current:
            self._write(text)
        else:
            self._waiting[index] += text

    def on_finish(self, index: int, output: "RequestOutput") -> None:
        """Take the finished answer `index`; the next one in line starts to stream."""
        self._outputs[index] = output
        while self._current < len(self._outputs) and (done := self._outputs[self._current]) is not None:
            self._report(done)
            self._current += 1
            if self._current < len(self._waiting):
                self._write(self._waiting[self._current])


def print_answers(llm: "LLM", rows: Sequence[PromptRow], params: "SamplingParams", *, raw: bool, as_json: bool) -> None:
    """Answer all rows in one batch; print JSON lines, or the text as it grows with figures on stderr."""

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def record(output: "RequestOutput") -> None:
        write(json_line(output) + "\n")

    def finish_text(output: "RequestOutput") -> None:
        write("\n")
        sys.stderr.write(f"[{figures(output)}]\n")

    if as_json:
        write_utf8()
    answers = OrderedAnswers(len(rows), write, record if as_json else finish_text)
    prompts = [chat_prompt(llm.tokenizer, row.messages, raw=raw) for row in rows]
    on_delta = None if as_json else answers.on_delta
    llm.generate(prompts, params, on_delta=on_delta, on_finish=answers.on_finish)
