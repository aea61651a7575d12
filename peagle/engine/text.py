"""Token ids to text while they arrive: whole characters only, stop strings found and cut."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


class TextStream:
    """Text of one growing response.

    `text` is what has been decoded; `take()` hands out what is safe to show: never half a character, never a piece
    that may turn out to be the beginning of a stop string.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = stop
        self._shown = 0
        self.text = ""
        self.stopped = False

    def push(self, token_id: int) -> bool:
        """Add one token; True once a stop string is complete, with `text` cut before it."""
        if piece := self._decode(token_id):
            self._extend(piece)
        return self.stopped

    def _extend(self, piece: str) -> None:
        """Add text; what is behind the beginning of a stop string goes away again."""
        longest = max(map(len, self._stop), default=0)
        search_from = max(0, len(self.text) - longest)
        self.text += piece
        cuts = [at for at in (self.text.find(s, search_from) for s in self._stop) if at >= 0]
        if cuts:
            self.text = self.text[: min(cuts)]
            self.stopped = True

    def _decode(self, token_id: int) -> str | None:
        """The text that a token completes, if any."""
        tokenizer = self._tokenizer.backend_tokenizer
        try:
            return self._stream.step(tokenizer, token_id)
        except Exception as error:
            if "Invalid prefix" not in str(error):
                raise
            # The library gives up where a token changes the text of those before it. `finish` decodes them all again.
            self._stream = DecodeStream(skip_special_tokens=True)
            return self._stream.step(tokenizer, token_id)

    def take(self, *, final: bool = False) -> str:
        """New text since the last call. `final` releases what was held back for a stop string that never came."""
        end = len(self.text) if final or self.stopped else len(self.text) - self._held_back()
        piece = self.text[self._shown : max(end, self._shown)]
        self._shown = max(end, self._shown)
        return piece

    def finish(self, token_ids: list[int]) -> str:
        """The complete text of a response; a character cut short by the end becomes U+FFFD as in `decode`.

        A token may hold the end of a stop string and the beginning of a character, so one may be found only now."""
        if not self.stopped:
            whole = self._tokenizer.decode(token_ids, skip_special_tokens=True)
            if whole.startswith(self.text):
                self._extend(whole[len(self.text) :])
        return self.text

    def _held_back(self) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(max(map(len, self._stop), default=0), len(self.text)), 0, -1):
            if any(s.startswith(self.text[-length:]) for s in self._stop):
                return length
        return 0


class MeasuredStream(TextStream):
    """Also keeps `ends`: characters of text there were after each token pushed, none beyond the end of the text."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        super().__init__(tokenizer, stop)
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
