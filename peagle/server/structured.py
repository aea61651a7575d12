"""Fields that say what an answer must be: `response_format` and vLLM's, and their way to a grammar."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from peagle.engine.engine import LLM
from peagle.errors import PeagleError, Unavailable
from peagle.server.body import Body
from peagle.server.errors import ApiError
from peagle.structured.grammars import Grammars
from peagle.structured.outputs import StructuredOutputs
from peagle.structured.trials import Trials

_log = logging.getLogger(__name__)

MAX_COMPILING = 4  # at once; one that hangs occupies its place until its time is over
WAIT_SECONDS = 10.0  # for a place

Schema = dict[str, Any] | bool


class JsonSchema(Body):
    """OpenAI's wrapping of a schema."""

    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    description: str | None = None
    schema_: Annotated[Schema, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Body):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            message = (
                f"response_format has type {self.type!r}: json_schema goes with type 'json_schema', and only there"
            )
            raise ApiError(400, message, param="response_format")
        return self

    def outputs(self) -> StructuredOutputs | None:
        """What it asks for."""
        if self.type == "text":
            return None
        if self.json_schema is None:
            return StructuredOutputs(json_object=True)
        return StructuredOutputs(json=self.json_schema.schema_, strict=self.json_schema.strict is not False)


class StructuredOutputsBody(Body):
    """vLLM's `structured_outputs`."""

    json_: Annotated[str | Schema | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def outputs(self) -> StructuredOutputs:
        """What it asks for."""
        return StructuredOutputs(
            json=self.json_, json_object=bool(self.json_object), regex=self.regex, choice=self.choice,
            grammar=self.grammar,
        )  # fmt: skip


class StructuredFields(Body):
    """The fields of a body that say what its answer must be; at most one of them."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsBody | None = None
    guided_json: str | Schema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def structure(self) -> tuple[str, StructuredOutputs] | None:
        """The field that asks for something, and what; None if nothing does."""
        names = [name for name in StructuredFields.model_fields if getattr(self, name) is not None]
        if self.response_format is not None and self.response_format.type == "text":
            names.remove("response_format")
        if not names:
            return None
        name = names[0]
        if len(names) > 1:
            raise ApiError(400, f"{name} and {names[1]}: give one of the two", param=name)
        value = getattr(self, name)
        try:
            if name.startswith("guided_"):
                return name, StructuredOutputs(**{name.removeprefix("guided_"): value})
            outputs = value.outputs()
        except PeagleError as error:
            raise ApiError(400, f"{name}: {error}", param=name) from None
        return name, outputs


class Compiler:
    """Has grammars compiled in threads, a few at a time. How long one may take is up to the grammars' trials."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(MAX_COMPILING)
        self._threads = ThreadPoolExecutor(MAX_COMPILING, "peagle-grammar")
        self._running: dict[StructuredOutputs, asyncio.Task[None]] = {}

    async def compile(self, grammars: Grammars, asked: StructuredOutputs, name: str) -> None:
        """Have a grammar compiled unless it is kept; a 400 about the field `name` if it is not usable, a 503 if there
        is no room for its compilation."""
        try:
            if grammars.kept(asked) is None:
                await asyncio.shield(self._task(grammars, asked))
        except Unavailable as error:
            raise ApiError(503, f"{name}: {error}", code="unavailable", headers={"Retry-After": "5"}) from None
        except PeagleError as error:
            raise ApiError(400, f"{name}: {error}", param=name) from None

    def _task(self, grammars: Grammars, asked: StructuredOutputs) -> asyncio.Task[None]:
        """The compilation under way; requests that ask for the same share it, and none of them ends it by leaving."""
        if asked not in self._running:
            task = self._running[asked] = asyncio.create_task(self._compile(grammars, asked))
            task.add_done_callback(lambda _: self._running.pop(asked))
        return self._running[asked]

    async def _compile(self, grammars: Grammars, asked: StructuredOutputs) -> None:
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._places.acquire()
        except TimeoutError:
            message = f"{MAX_COMPILING} grammars are compiled already, as many as may be at once: try again later"
            raise Unavailable(message) from None
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, grammars.compile, asked)
        finally:
            self._places.release()


@contextmanager
def trials_of(llm: LLM) -> Iterator[Callable[[], None]]:
    """A server's grammars are tried out in processes that can be stopped, which end with it; yields what ends them
    earlier."""
    try:
        grammars = llm.grammars
    except PeagleError as error:
        _log.info("no structured outputs: %s", error)
        yield lambda: None
        return
    with Trials(grammars.vocabulary) as grammars.trials:
        yield grammars.trials.close
