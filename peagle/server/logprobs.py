"""Log-probabilities as OpenAI writes them: one form for chat, an older one for completions."""

import codecs
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from peagle.engine.outputs import Logprobs, ScoredToken

_LOWEST = -9999.0  # JSON knows no infinity
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenNames:
    """What tokens stand for, as bytes: a token may begin or end within a character."""

    def __init__(self, tokenizer: Any) -> None:
        decoder = tokenizer.backend_tokenizer.decoder
        rules = "" if decoder is None else json.dumps(json.loads(decoder.__getstate__()), ensure_ascii=False)
        self._tokenizer = tokenizer
        self._byte_of = _byte_alphabet() if "ByteLevel" in rules else {}
        self._has_bytes, self._marks_spaces = "ByteFallback" in rules, "▁" in rules or "Metaspace" in rules
        self._added = {number: str(token.content) for number, token in tokenizer.added_tokens_decoder.items()}

    def data(self, token_id: int) -> bytes:
        """A token's bytes; none for an id that only pads the vocabulary."""
        if token_id in self._added:
            return self._added[token_id].encode()
        piece = self._tokenizer.convert_ids_to_tokens(token_id) or ""
        if self._byte_of:
            return b"".join(self._byte_of.get(char) or char.encode() for char in piece)
        if self._has_bytes and (byte := _BYTE.fullmatch(piece)):
            return bytes.fromhex(byte[1])
        return (piece.replace("▁", " ") if self._marks_spaces else piece).encode()

    def ends(self, token_ids: Sequence[int], text: str) -> list[int]:
        """How many characters of `text`, which the tokens make, are complete after each of them."""
        decode, total, ends = codecs.getincrementaldecoder("utf-8")("replace").decode, 0, []
        for token_id in token_ids:
            total += len(decode(self.data(token_id)))
            ends.append(total)
        dropped = max(total - len(text), 0)  # the space that some tokenizers put before a text
        return [max(end - dropped, 0) for end in ends]


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that comes before its answer, and how much of it there is after each of its tokens."""

    text: str = ""
    ends: Sequence[int] = ()

    def scored(self, token_ids: Sequence[int], logprobs: Logprobs) -> list[ScoredToken]:
        """The prompt's tokens; the first follows nothing and has no log-probability, and so have those that a request
        which was cut short never came to."""
        offsets, known = [0, *self.ends], 1 + len(logprobs)
        pairs = zip(token_ids[1:known], offsets[1:known], logprobs, strict=True)
        rest = zip(token_ids[known:], offsets[known:-1], strict=True)
        return [
            ScoredToken(token_ids[0], 0, None, []),
            *(ScoredToken(token_id, offset, *told) for token_id, offset, told in pairs),
            *(ScoredToken(token_id, offset, None, []) for token_id, offset in rest),
        ]


def chat_logprobs(names: TokenNames, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
    """The field `logprobs` of a choice in a chat."""

    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        data = names.data(token_id)
        return {"token": data.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(data)}

    content = [
        {**entry(token.token_id, token.logprob), "top_logprobs": [entry(*likely) for likely in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(names: TokenNames, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
    """The field `logprobs` of a completion's choice. The token itself is always among the likeliest."""
    return {
        "tokens": [_name(names, token.token_id) for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [_by_name(names, token) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _by_name(names: TokenNames, token: ScoredToken) -> dict[str, float | None] | None:
    if token.logprob is None:
        return None
    found: dict[str, float | None] = {}
    for token_id, logprob in [*token.top, (token.token_id, token.logprob)]:
        found.setdefault(_name(names, token_id), _finite(logprob))
    return found


def _name(names: TokenNames, token_id: int) -> str:
    """A token as text; the bytes of one that is no text, for tokens to keep apart."""
    data = names.data(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(_LOWEST, logprob)


def _byte_alphabet() -> dict[str, bytes]:
    """The characters by which byte-level vocabularies write bytes: printable ones stand for themselves, the others, in
    order, for the bytes that have none."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): bytes([byte]) for byte in own} | {
        chr(256 + place): bytes([byte]) for place, byte in enumerate(others)
    }
