"""How a model chats: whether it thinks aloud, and in which dialect it calls functions. Told by its template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Self

from peagle.config import ServeConfig
from peagle.server.answer_parsing import CALL, END_THINK, THINK, Parser, PlainText, Thoughts
from peagle.server.harmony import Harmony, begun_header, harmony_turns
from peagle.server.harmony_parsing import HarmonyMessages
from peagle.server.tools import Dialect, ToolUse, as_text
from peagle.structured.outputs import StructuredOutputs


@dataclass(frozen=True, slots=True)
class ChatStyle:
    """What is the same in all chats with a model."""

    dialect: Dialect = "hermes"
    knows_tools: bool = False  # the template describes them, in this dialect
    thinks: bool = False
    takes_effort: bool = False  # the template tells the model how much to think

    @classmethod
    def of(
        cls,
        template: object,
        config: ServeConfig,
        tokens: Mapping[str, int] = MappingProxyType({}),
        eos_ids: Sequence[int] = (),
    ) -> Self:
        """By the chat template, where the config does not say. `tokens` are those that no text contains, `eos_ids` end
        it."""
        text = str(template or "")
        if config.tool_call_parser == config.reasoning_parser == "auto":
            harmony = Harmony.of(text, tokens, eos_ids)
            if harmony is not None:
                return cls(harmony, knows_tools="tools" in text, takes_effort="reasoning_effort" in text)
        dialect: Dialect = "hermes"
        knows_tools = "tools" in text
        if config.tool_call_parser == "llama3_json":
            dialect = "llama3_json"
        elif config.tool_call_parser == "auto" and CALL not in text:
            if '"parameters"' in text:
                dialect = "llama3_json"
            else:
                knows_tools = False  # if it does, in a dialect that nobody here reads
        thinks = config.reasoning_parser == "think" or (config.reasoning_parser == "auto" and END_THINK in text)
        return cls(dialect, knows_tools, thinks)

    @property
    def harmony(self) -> Harmony | None:
        """The format of a model whose answers are messages with channels."""
        return self.dialect if isinstance(self.dialect, Harmony) else None

    def turns(self, turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """A conversation as the template takes it. Only harmony's is given what was thought."""
        if self.harmony is not None:
            return harmony_turns(turns)
        spoken = [{name: value for name, value in turn.items() if name != "thinking"} for turn in turns]
        return spoken if self.knows_tools else [as_text(turn) for turn in spoken]

    def behind_thought(self, outputs: StructuredOutputs, prompt: str, *, of_tools: bool) -> StructuredOutputs:
        """The same for what an answer to a rendered prompt says once it has thought, which it may do first."""
        if self.harmony is not None:
            return outputs if of_tools else self.harmony.answer(outputs)
        if not self.thinks:
            return outputs
        return replace(outputs, thought=("" if _opens_thought(prompt) else THINK, END_THINK))

    def parser(self, prompt: str, tools: ToolUse | None) -> Parser:
        """A parser of the answer to a rendered prompt."""
        if self.harmony is not None:
            messages = HarmonyMessages(None if tools is None else {function.name for function in tools.functions})
            messages.push(begun_header(prompt))
            return messages
        rest = PlainText() if tools is None else tools.parser()
        return Thoughts(rest, is_open=_opens_thought(prompt)) if self.thinks else rest


def _opens_thought(prompt: str) -> bool:
    return prompt.rstrip().endswith(THINK)
