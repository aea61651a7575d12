"""Functions that a chat may call: the fields of a body, what a template sees of them, the grammar of their calls."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from peagle.errors import PeagleError
from peagle.server.answer_parsing import CALL, END_CALL, HermesCalls, JsonCalls, Parser
from peagle.server.body import Body
from peagle.server.errors import ApiError
from peagle.server.harmony import Harmony
from peagle.structured.outputs import MAX_WHITESPACE, StructuredOutputs
from peagle.structured.schema import check_schema

MAX_TOOLS = 128
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
Dialect = Literal["hermes", "llama3_json"] | Harmony

_ABOUT_TOOLS = """You can call functions. They are, one a line:
{tools}
To call one, write its name and its arguments like this:
<tool_call>
{{"name": "the name", "arguments": {{"an argument": "its value"}}}}
</tool_call>"""


class Function(Body):
    """A function, as `tools` describes it."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def accepts(self) -> dict[str, Any]:
        """The JSON schema of its arguments."""
        return self.parameters or {"type": "object", "properties": {}}


class Tool(Body):
    """An entry of `tools`."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """Which function, by name."""

    name: FunctionName


class NamedTool(Body):
    """`tool_choice` that names one."""

    type: Literal["function"]
    function: NamedFunction


class CalledFunction(Body):
    """A call in an assistant's message."""

    name: str
    arguments: str


class ToolCall(Body):
    """An entry of an assistant message's `tool_calls`."""

    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None  # which clients leave in when they put a stream together
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """As chat templates take it: the arguments an object."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            message = (
                f"messages has a call of {self.function.name:.64} whose arguments are no JSON object: correct them"
            )
            raise ApiError(400, message, param="messages")
        return {
            "id": self.id or "", "type": "function",
            "function": {"name": self.function.name, "arguments": arguments},
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The functions of one request, in the dialect in which its model calls them.

    `must_call`: the answer is nothing but calls; `several`: it may be more than one. A template that `knows_tools`
    describes them itself.
    """

    functions: Sequence[Function]
    dialect: Dialect
    must_call: bool
    several: bool
    knows_tools: bool

    def parser(self) -> Parser:
        """What reads an answer."""
        return HermesCalls() if self.dialect == "hermes" else JsonCalls({f.name for f in self.functions})

    def for_template(self) -> list[dict[str, Any]] | None:
        """As chat templates take them; None for one that takes none."""
        if not self.knows_tools:
            return None
        return [self._described(function) for function in self.functions]

    def introduced(self, turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """A conversation that begins with all about the tools, for a template that knows none."""
        if self.knows_tools:
            return turns
        about = _ABOUT_TOOLS.format(tools="\n".join(json.dumps(self._described(f)["function"]) for f in self.functions))
        if turns[0]["role"] == "system":
            return [{"role": "system", "content": f"{turns[0]['content']}\n\n{about}"}, *turns[1:]]
        return [{"role": "system", "content": about}, *turns]

    def outputs(self) -> StructuredOutputs | None:
        """The grammar of the answer; None where it is free."""
        strict = [function for function in self.functions if function.strict]
        if not self.must_call and not strict:
            return None
        for function in self.functions:
            check_schema(function.accepts, f"{function.name}.parameters")
        if isinstance(self.dialect, Harmony):
            return self.dialect.calls({f.name: _json(f) for f in self.functions}, must=self.must_call)
        calls = [self._call(function) for function in self.functions]
        if self.must_call:
            separator = "\n" if self.dialect == "hermes" else "; "
            form: dict[str, Any] = {"type": "or", "elements": calls}
            if self.several:
                form = {"type": "tags_with_separator", "tags": calls, "separator": separator, "at_least_one": True}
        elif self.dialect == "hermes":
            form = {"type": "triggered_tags", "triggers": [CALL], "tags": calls}
        else:
            raise PeagleError(
                f"{strict[0].name} is strict: calls of this model look like any text, so that needs "
                "tool_choice 'required'"
            )
        return StructuredOutputs(tag=json.dumps(form))

    def _call(self, function: Function) -> dict[str, Any]:
        """The grammar of a function's call."""
        name = json.dumps(function.name)
        if self.dialect == "hermes":
            begin, end = f'{CALL}\n{{"name": {name}, "arguments": ', f"}}\n{END_CALL}"
        else:
            begin, end = f'{{"name": {name}, "parameters": ', "}"
        return {"type": "tag", "begin": begin, "content": _json(function), "end": end}

    def _described(self, function: Function) -> dict[str, Any]:
        about = {} if function.description is None else {"description": function.description}
        if isinstance(self.dialect, Harmony):
            about.setdefault("description", "")  # its template has no other way
        return {"type": "function", "function": {"name": function.name, **about, "parameters": function.accepts}}


def _json(function: Function) -> dict[str, Any]:
    """The grammar of a function's arguments."""
    return {"type": "json_schema", "json_schema": function.accepts, "max_whitespace_cnt": MAX_WHITESPACE}


def settle_tools(
    tools: Sequence[Tool] | None,
    choice: Literal["none", "auto", "required"] | NamedTool | None,
    several: bool,
    dialect: Dialect,
    knows_tools: bool,
) -> ToolUse | None:
    """What a request wants with its tools; None for nothing."""
    functions = [tool.function for tool in tools or ()]
    if not functions:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice asks for a call, and there are no tools: give them", param="tool_choice")
        return None
    if len({function.name for function in functions}) < len(functions):
        raise ApiError(400, "tools has a name twice: give each function its own", param="tools")
    if choice == "none":
        return None
    if isinstance(choice, NamedTool):
        functions = [function for function in functions if function.name == choice.function.name]
        if not functions:
            message = f"tool_choice names {choice.function.name}, which is not among the tools: name one of them"
            raise ApiError(400, message, param="tool_choice")
        return ToolUse(functions, dialect, True, False, knows_tools)
    if choice != "required" and not knows_tools:
        message = (
            "tools with tool_choice 'auto': the chat template of this model takes no tools, or not in a dialect that "
            "is known here; ask for 'required' or name a function, which is enforced"
        )
        raise ApiError(400, message, param="tools")
    return ToolUse(functions, dialect, choice == "required", several, knows_tools)


def as_text(turn: dict[str, Any]) -> dict[str, Any]:
    """A turn for a template that knows no tools: calls, and what they gave, are text."""
    if turn["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{turn['content']}\n</tool_response>"}
    calls = [f"{CALL}\n{json.dumps(call['function'])}\n{END_CALL}" for call in turn.get("tool_calls", ())]
    kept: dict[str, Any] = {key: turn[key] for key in ("role", "name") if key in turn}
    return {**kept, "content": "\n".join(filter(None, [turn["content"], *calls]))}
