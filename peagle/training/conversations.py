"""Prompt rows -> conversations -> exact token ids with a loss mask.

The chat template is the only source of boundaries. A dialogue grows as it would in serving: the ids given to the target
for the next user turn are the ids of everything before (prompts, and the target's own output exactly as it sampled it,
never tokenised again) followed by the ids of the *connecting text*, which is what the template writes between the last
response and the next one. The loss mask is True on the target's own tokens, its end-of-turn token included, and nowhere
else; an end-of-turn token that the template wrote because the response ran out of tokens is not supervised.

Some templates rewrite history: they strip the reasoning of earlier answers, trim white space, or close a turn with
another token than the target did. Then the tokens so far cannot be continued. The dialogue is *split*: what was
generated becomes a document of its own, and the next turn starts from a fresh rendering in which the history is context
and nothing in it is supervised. Every supervised token is thus preceded by exactly what a server would have fed to the
target, and none is supervised twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from peagle.errors import PeagleError
from peagle.models.tokenizer import render_chat
from peagle.prompt_file import Message, PromptRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """The user's side of a dialogue. `steps[i]` holds the messages that precede the target's i-th response.

    A step ends with a user message and may begin with system messages.
    """

    id: str
    steps: tuple[tuple[Message, ...], ...]
    source: str = UNKNOWN
    license: str = UNKNOWN
    category: str = UNKNOWN


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """What the target generated for one turn: `text` without special tokens, `token_ids` as sampled."""

    text: str
    token_ids: Sequence[int]
    finish_reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RenderedDocument:
    """Token ids of one training document; `loss_mask` is True on the tokens that the target generated."""

    token_ids: list[int]
    loss_mask: list[bool]
    finish_reason: str


def conversation_from_row(row: PromptRow) -> Conversation:
    """The user's side of a prompt row, where every user message gets an answer from the target.

    Assistant messages in the row are left out, so the target's own answers take their place; two user messages without
    one between them get an answer each.
    """
    steps: list[tuple[Message, ...]] = []
    pending: list[Message] = []
    for message in (*row.messages, *({"role": "user", "content": text} for text in row.later_turns)):
        if message["role"] == "assistant":
            continue
        pending.append(message)
        if message["role"] == "user":
            steps.append(tuple(pending))
            pending = []
    return Conversation(
        id=row.id,
        steps=tuple(steps),
        source=row.source or UNKNOWN,
        license=row.license or UNKNOWN,
        category=row.category or UNKNOWN,
    )


def encode_all(tokenizer: "PreTrainedTokenizerFast", texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text that a chat template wrote, as `encode` gives them, in one parallel call."""
    return tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"] if texts else []


@dataclass(slots=True)
class Dialogue:
    """One conversation on its way through the target: `open_turn`, `add_prompt`, `add_response`, and again.

    `token_ids` and `loss_mask` are those of the document being built; `documents` holds the ones split off before.
    """

    conversation: Conversation
    token_ids: list[int] = field(default_factory=list)
    documents: list[RenderedDocument] = field(default_factory=list)
    splits: int = 0
    _loss_mask: list[bool] = field(default_factory=list)
    _messages: list[Message] = field(default_factory=list)
    _text: str = ""
    _end_text: str = ""
    _finish_reason: str = ""
    _turns: int = 0

    @property
    def turns_left(self) -> int:
        """User turns that the target has not answered yet."""
        return len(self.conversation.steps) - self._turns

    def open_turn(self, tokenizer: "PreTrainedTokenizerFast") -> str:
        """Add the next user turn and return the text to append to the tokens so far, the generation prompt included."""
        self._messages.extend(self.conversation.steps[self._turns])
        rendered = _render(tokenizer, self._messages, self.conversation.id)
        expected = self._text + self._end_text
        if self._turns and not rendered.startswith(expected):
            self.splits += 1
            self.close()
            expected = ""
        self._text = rendered
        return rendered[len(expected) :]

    def add_prompt(self, token_ids: Sequence[int]) -> None:
        """Append the ids of the text that `open_turn` returned; they are context and not supervised."""
        self.token_ids.extend(token_ids)
        self._loss_mask.extend([False] * len(token_ids))

    def drop_turn(self) -> None:
        """End the dialogue before the turn just opened; documents of the earlier turns stay."""
        supervised = len(self._loss_mask)
        while supervised and not self._loss_mask[supervised - 1]:
            supervised -= 1
        del self.token_ids[supervised:], self._loss_mask[supervised:]
        self.close()

    def add_response(self, response: Response, end_text: str) -> None:
        """Append the target's answer. `end_text` is the text of the end token it generated last, "" if it did not."""
        self.token_ids.extend(response.token_ids)
        self._loss_mask.extend([True] * len(response.token_ids))
        self._messages.append({"role": "assistant", "content": response.text})
        self._text += response.text
        self._end_text = end_text
        self._finish_reason = response.finish_reason
        self._turns += 1

    def close(self) -> None:
        """Turn the tokens so far into a document; nothing happens when there are none."""
        if self.token_ids:
            document = RenderedDocument(
                token_ids=self.token_ids, loss_mask=self._loss_mask, finish_reason=self._finish_reason
            )
            self.documents.append(document)
        self.token_ids, self._loss_mask = [], []


def _render(tokenizer: "PreTrainedTokenizerFast", messages: list[Message], row_id: str) -> str:
    try:
        return render_chat(tokenizer, messages, add_generation_prompt=True)
    except PeagleError as error:
        raise PeagleError(f"prompt {row_id}: {error}") from None
