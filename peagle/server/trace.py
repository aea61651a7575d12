"""Where each token of an answer came from: the drafter, or the target itself. For the page, and for whoever asks."""

from typing import Any

from peagle.engine.outputs import ShownRound
from peagle.engine.text import TextStream
from peagle.server.answer_parsing import Parser, PlainText
from peagle.server.engine_thread import Delta
from peagle.server.harmony import Harmony
from peagle.server.harmony_parsing import HarmonyMessages


class Trace:
    """The tokens of one growing answer as they are told to a client, with what the verification made of them.

    `kind` is "accepted" for a draft that was kept; the others are the target's own: "corrected" in place of a draft
    that it rejected, "bonus" after a round whose drafts were all kept, "plain" where nothing was drafted. `position`
    counts the drafts of a round from 1: that of the draft that was kept, or of the first that was not. `rejected` is
    that one and those after it. With `harmony` headers have no text, and what was thought is marked.
    """

    def __init__(self, tokenizer: Any, harmony: Harmony | None = None) -> None:
        self._tokenizer = tokenizer
        self._text = TextStream(tokenizer, (), harmony.marks if harmony else {})
        self._parser: Parser = HarmonyMessages(None) if harmony else PlainText()
        self._count = 0

    def tokens(self, delta: Delta) -> list[dict[str, Any]]:
        """The new tokens of a delta. A token that ends in half a character has the text that is whole by then."""
        marks: dict[int, dict[str, Any]] = {}
        for shown in delta.trace:
            for position in range(1, shown.accepted + 1):
                marks[shown.first_index + position - 1] = {"kind": "accepted", "position": position}
            marks[shown.first_index + shown.accepted] = self._own(shown)
        told = []
        for token_id in delta.token_ids:
            self._text.push(token_id)
            mark = marks.get(self._count, {"kind": "plain"})
            pieces = self._parser.push(self._text.take())
            thought = {"thought": True} if pieces and pieces[-1].kind == "thought" else {}
            told.append({"id": token_id, "text": "".join(piece.text for piece in pieces), **mark, **thought})
            self._count += 1
        if told and delta.output is not None:
            told[-1]["text"] += "".join(piece.text for piece in self._parser.finish())
        return told

    def _own(self, shown: ShownRound) -> dict[str, Any]:
        """What is said of the token that the target added to a round."""
        rejected = shown.drafts[shown.accepted :]
        if not rejected:
            return {"kind": "bonus"}
        texts = [{"id": token_id, "text": str(self._tokenizer.decode([token_id]))} for token_id in rejected]
        return {"kind": "corrected", "position": shown.accepted + 1, "rejected": texts}
