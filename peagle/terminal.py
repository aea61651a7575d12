"""What `generate` and `chat` print: answers streamed in prompt order, a line of figures each, or JSON lines."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from peagle.exits import write_utf8
from peagle.models.tokenizer import added_tokens, chat_prompt
from peagle.prompt_file import PromptRow
from peagle.server.answer_parsing import Parser, PlainText
from peagle.server.harmony import Harmony
from peagle.server.harmony_parsing import HarmonyMessages

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


def json_line(prompt: str, output: "RequestOutput", said: Mapping[str, str] | None = None) -> str:
    """The machine-readable record of one answer, on one line for every reader; `prompt` is the user's message, `said`
    the answer's text, and its thought."""
    stats = output.stats
    record = {
        "prompt": prompt,
        "templated_prompt": output.prompt,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "num_rounds": stats.num_rounds,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "acceptance_length": round(stats.acceptance_length, 4),
        "accepted_per_position": stats.accepted_per_position,
        "tokens_per_second": round(output.tokens_per_second, 2),
        **(said or {}),
    }
    line = json.dumps(record, ensure_ascii=False)
    for character in LINE_ENDS:
        line = line.replace(character, f"\\u{ord(character):04x}")
    return line


def channels_of(llm: "LLM", params: "SamplingParams") -> "tuple[Harmony | None, SamplingParams]":
    """The channels in which a model answers, if it has some, and `params` with which such an answer ends."""
    harmony = Harmony.of(str(llm.tokenizer.chat_template or ""), added_tokens(llm.tokenizer))
    if harmony is not None and not params.ignore_eos:
        params = replace(params, stop_token_ids=(*params.stop_token_ids, *harmony.stop_ids))
    return harmony, params


class Answer:
    """Writes an answer as it grows. Where a model thinks aloud in a channel of its own, it says which is which."""

    def __init__(self, harmony: Harmony | None, write: Callable[[str], object]) -> None:
        self._parser: Parser = PlainText() if harmony is None else HarmonyMessages(None)
        self._write, self._kind = write, "text"
        self.said = {"text": "", "thought": ""}

    def take(self, text: str, *, final: bool = False) -> None:
        """More of the text; `final`: nothing follows."""
        for piece in self._parser.push(text) + (self._parser.finish() if final else []):
            if piece.kind != self._kind:
                self._write("[thought] " if piece.kind == "thought" else "\n[answer] ")
            self._kind = piece.kind
            self._write(piece.text)
            self.said[piece.kind] += piece.text


class OrderedAnswers:
    """Reports answers in prompt order while the engine works on many at once.

    The first unfinished answer is streamed through `write` as it grows; later ones wait in memory until their turn.
    `finished` is called once per answer, after its last text; `current` is which one that is.
    """

    def __init__(
        self, count: int, write: Callable[[str], object], finished: Callable[["RequestOutput"], object]
    ) -> None:
        self._write, self._report = write, finished
        self._waiting = [""] * count
        self._outputs: list[RequestOutput | None] = [None] * count
        self.current = 0

    def on_delta(self, index: int, text: str) -> None:
        """Take new text of answer `index`."""
        if index == self.current:
            self._write(text)
        else:
            self._waiting[index] += text

    def on_finish(self, index: int, output: "RequestOutput") -> None:
        """Take the finished answer `index`; the next one in line starts to stream."""
        self._outputs[index] = output
        while self.current < len(self._outputs) and (done := self._outputs[self.current]) is not None:
            self._report(done)
            self.current += 1
            if self.current < len(self._waiting):
                self._write(self._waiting[self.current])


def print_answers(llm: "LLM", rows: Sequence[PromptRow], params: "SamplingParams", *, raw: bool, as_json: bool) -> None:
    """Answer all rows in one batch; print JSON lines, or the text as it grows with figures on stderr."""

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def record(output: "RequestOutput") -> None:
        prompt, said = rows[ordered.current].messages[-1]["content"], each[ordered.current].said
        write(json_line(prompt, output, None if harmony is None else said) + "\n")

    def finish_text(output: "RequestOutput") -> None:
        write("\n")
        sys.stderr.write(f"[{figures(output)}]\n")

    if as_json:
        write_utf8()
    ordered = OrderedAnswers(len(rows), write, record if as_json else finish_text)
    harmony, params = (None, params) if raw else channels_of(llm, params)
    shown = [str if as_json else partial(ordered.on_delta, index) for index in range(len(rows))]  # str: not at all
    each = [Answer(harmony, show) for show in shown]

    def finish(index: int, output: "RequestOutput") -> None:
        each[index].take("", final=True)
        ordered.on_finish(index, output)

    llm.generate(
        [chat_prompt(llm.tokenizer, row.messages, raw=raw) for row in rows],
        params,
        on_delta=None if as_json and harmony is None else lambda index, text: each[index].take(text),
        on_finish=finish,
        marks=None if harmony is None else harmony.marks,
    )
