"""How a model chats: whether it thinks aloud, and in which dialect it calls functions. Told by its template."""

from dataclasses import dataclass
from typing import Self

from peagle.config import ServeConfig
from peagle.server.answer_parsing import CALL, END_THINK, THINK, Parser, PlainText, Thoughts
from peagle.server.tools import Dialect, ToolUse


@dataclass(frozen=True, slots=True)
class ChatStyle:
    """What is the same in all chats with a model."""

    dialect: Dialect = "hermes"
    knows_tools: bool = False  # the template describes them, in this dialect
    thinks: bool = False

    @classmethod
    def of(cls, template: object, config: ServeConfig) -> Self:
        """By the chat template, where the config does not say."""
        text = str(template or "")
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

    def thought(self, prompt: str) -> tuple[str, str] | None:
        """What opens and what closes the thought that may begin an answer; None for a model that has none."""
        if not self.thinks:
            return None
        return ("" if _opens_thought(prompt) else THINK, END_THINK)

    def parser(self, prompt: str, tools: ToolUse | None) -> Parser:
        """A parser of the answer to a rendered prompt."""
        rest = PlainText() if tools is None else tools.parser()
        return Thoughts(rest, is_open=_opens_thought(prompt)) if self.thinks else rest


def _opens_thought(prompt: str) -> bool:
    return prompt.rstrip().endswith(THINK)
