"""Token ids to text while they arrive: whole characters only, stop strings found and cut."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tokenizers.decoders import DecodeStream


class TextStream:
    """Text of one growing response.

    `text` is what has been decoded; `take()` hands out what is safe to show: never half a character, never a piece
    that may turn out to be the beginning of a stop string. Special tokens are left out, but for those that have a mark,
    which divide the text: between two of them it is decoded by itself.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str],
        marks: Mapping[int, str] = MappingProxyType({}),
        *,
        keeps_stop: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop, self._marks, self._keeps_stop = stop, marks, keeps_stop
        self._part: list[int] = []  # tokens since the last mark, if there can be any
        self._part_start, self._count = 0, 0  # characters before them; tokens pushed
        self._shown = 0
        self.text = ""
        self.stop_string: str | None = None  # the one that was found

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.stop_string is not None

    def push(self, token_id: int) -> bool:
        """Add one token; True once a stop string is complete, with `text` cut before it, or behind it to keep it."""
        if piece := self._decode(token_id):
            self._extend(piece)
        return self.stopped

    def _extend(self, piece: str) -> None:
        """Add text; what is behind the beginning of a stop string goes away again."""
        if not self._stop:
            self.text += piece
            return
        search_from = max(0, len(self.text) - max(map(len, self._stop)))
        self.text += piece
        found = [(at, len(s), s) for s in self._stop if (at := self.text.find(s, search_from)) >= 0]
        if found:
            at, length, self.stop_string = min(found)
            self.text = self.text[: at + length * self._keeps_stop]

    def _decode(self, token_id: int) -> str | None:
        """The text that a token completes, if any."""
        self._count += 1
        if token_id in self._marks:
            return self._divide(token_id)
        if self._marks:
            self._part.append(token_id)
        tokenizer = self._tokenizer.backend_tokenizer
        try:
            return self._stream.step(tokenizer, token_id)
        except Exception as error:
            if "Invalid prefix" not in str(error):
                raise
            # The library gives up where a token changes the text of those before it. `finish` decodes them all again.
            self._stream = DecodeStream(skip_special_tokens=True)
            return self._stream.step(tokenizer, token_id)

    def _divide(self, token_id: int) -> str:
        """A mark, behind what is left of the part that it ends."""
        text = self._left() + self._marks[token_id]
        self._stream, self._part = DecodeStream(skip_special_tokens=True), []
        self._part_start = len(self.text) + len(text)
        return text

    def _left(self) -> str:
        """What is held back of a part: a character that never became whole, as in `decode`."""
        whole, known = str(self._tokenizer.decode(self._part, skip_special_tokens=True)), self.text[self._part_start :]
        return whole[len(known) :] if whole.startswith(known) else ""

    def take(self, *, final: bool = False) -> str:
        """New text since the last call. `final` releases what was held back for a stop string that never came."""
        end = len(self.text) if final or self.stopped else len(self.text) - self._held_back()
        piece = self.text[self._shown : max(end, self._shown)]
        self._shown = max(end, self._shown)
        return piece

    def finish(self, token_ids: list[int]) -> str:
        """The complete text of a response; a character cut short by the end becomes U+FFFD as in `decode`.

        A token may hold the end of a stop string and the beginning of a character, so one may be found only now."""
        if self._marks:
            while not self.stopped and self._count < len(token_ids):  # the one that ended it: its mark may end a part
                self.push(token_ids[self._count])
            if not self.stopped:
                self._extend(self._left())
        elif not self.stopped:
            whole = self._tokenizer.decode(token_ids, skip_special_tokens=True)
            if whole.startswith(self.text):
                self._extend(whole[len(self.text) :])
        return self.text

    def _held_back(self) -> int:
        """Length of the longest end of `text` that begins a stop string which is to be left out."""
        if self._keeps_stop or not self._stop:
            return 0
        for length in range(min(max(map(len, self._stop)), len(self.text)), 0, -1):
            if any(s.startswith(self.text[-length:]) for s in self._stop):
                return length
        return 0


class MeasuredStream(TextStream):
    """Also keeps `ends`: characters of text there were after each token pushed, none beyond the end of the text."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ends: list[int] = []

    def push(self, token_id: int) -> bool:
        """Add one token, as `TextStream` does."""
        stopped = super().push(token_id)
        self.ends.append(len(self.text))
        return stopped

    def _extend(self, piece: str) -> None:
        super()._extend(piece)
        if self.stopped:
            self.ends = [min(end, len(self.text)) for end in self.ends]

    @property
    def num_shown(self) -> int:
        """Tokens whose text `take` has handed out in full. One that completes no character counts with the next one
        that does."""
        count = bisect_right(self.ends, self._shown)
        while count and self.ends[count - 1] == (self.ends[count - 2] if count > 1 else 0):
            count -= 1
        return count
