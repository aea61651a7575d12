"""Fields that say what an answer must be: `response_format` and vLLM's, and their way to a grammar."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from peagle.errors import PeagleError
from peagle.server.body import Body
from peagle.server.errors import ApiError
from peagle.structured.outputs import StructuredOutputs

COMPILE_SECONDS = 10.0
MAX_COMPILING = 2  # at once; one that hangs occupies its place

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
    """Compiles grammars in threads of their own, a few at a time, none longer than somebody waits."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(MAX_COMPILING)

    async def compile(self, make: Callable[[], object], name: str) -> None:
        """Have `make` compile a grammar; a 400 about the field `name` if it is not usable, or not in time."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def work() -> None:
            error: Exception | None = None
            try:
                make()
            except Exception as caught:
                error = caught
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(finish, error)

        def finish(error: Exception | None) -> None:
            self._places.release()
            if not done.done():
                done.set_result(None) if error is None else done.set_exception(error)

        try:
            async with asyncio.timeout(COMPILE_SECONDS):
                await self._places.acquire()
                threading.Thread(target=work, name="peagle-grammar", daemon=True).start()
                await done
        except TimeoutError:
            message = f"{name} takes more than {COMPILE_SECONDS:g} seconds to compile: use a simpler one"
            raise ApiError(400, message, param=name) from None
        except PeagleError as error:
            raise ApiError(400, f"{name}: {error}", param=name) from None
