"""The interactive conversation of `peagle chat`."""

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from peagle.errors import PeagleError
from peagle.models.tokenizer import check_unicode
from peagle.terminal import Answer, channels_of, figures

if TYPE_CHECKING:
    from peagle.engine.engine import LLM
    from peagle.sampling import SamplingParams

WELCOME = "Type a message. /help lists the commands, /exit leaves, Ctrl-C stops an answer."
HELP = """/reset  start over, with nothing said before
/exit   leave, as the end of input does (Ctrl-D)
/help   this list
Ctrl-C  stop an answer; a second one leaves
Everything else is a message to the model."""
PROMPT = "\n> "

Write = Callable[[str], object]


class Conversation:
    """The messages so far, and one streamed answer at a time. What was thought before one stays out of them. `write`
    takes the answers, `note` what is said of them. `piped`: Ctrl-C ends more than an answer."""

    def __init__(self, llm: "LLM", params: "SamplingParams", write: Write, note: Write, *, piped: bool = False) -> None:
        self._llm, self._write, self._note, self._piped = llm, write, note, piped
        self._harmony, self._params = channels_of(llm, params)
        self.messages: list[dict[str, str]] = []

    def reset(self) -> None:
        """Forget everything said so far."""
        self.messages.clear()

    def answer(self, text: str) -> None:
        """Stream the answer to the user's `text`. Ctrl-C stops it; what was said until then stays in the conversation.
        Of a pipe it raises KeyboardInterrupt to the caller, once the line is ended.

        A message that is refused (too long for the context, or no Unicode text) raises and is not kept.
        """
        harmony = self._harmony
        answer = Answer(harmony, self._write)
        asked = [*self.messages, {"role": "user", "content": check_unicode(text, "the message")}]
        try:
            output = self._llm.chat(
                [asked],
                self._params,
                on_delta=lambda _, piece: answer.take(piece),
                marks=None if harmony is None else harmony.marks,
            )[0]
            answer.take("", final=True)
        except KeyboardInterrupt:
            if self._piped:
                self._write("\n")
                raise
            said = "stopped; Ctrl-C again leaves"
        else:
            said = figures(output)
        self._write("\n")
        self._note(f"[{said}]\n")
        self.messages = [*asked, {"role": "assistant", "content": answer.said["text"]}]


def run_chat(llm: "LLM", params: "SamplingParams", read: Callable[[str], str] = input, *, piped: bool = False) -> bool:
    """Talk until /exit or end of input. Ctrl-C while waiting for a message raises KeyboardInterrupt to the caller.

    `piped`: no person types. Then stdout gets the answers alone, with thoughts that have marks, and whatever else there
    is to say goes to stderr; Ctrl-C raises in an answer too, and what returns is whether a message was refused."""
    welcome, prompt, end = ("", "", "") if piped else (WELCOME + "\n", PROMPT, "\n")
    write = partial(print, end="", flush=True)
    note = partial(write, file=sys.stderr) if piped else write
    with suppress(ImportError):
        import_module("readline")  # arrow keys and history for input(), where the platform has it
    conversation, refused = Conversation(llm, params, write, note, piped=piped), False
    note(welcome)
    while True:
        try:
            text = read(prompt).strip()
        except EOFError:
            note(end)
            return refused
        if text == "/exit":
            return refused
        if text == "/help":
            note(HELP + "\n")
        elif text == "/reset":
            conversation.reset()
            note("[new conversation]\n")
        elif text:
            try:
                conversation.answer(text)
            except PeagleError as error:
                refused = piped
                note(f"[{error}]\n" if piped else f"[{error}; /reset starts over]\n")
