"""POST /v1/chat/completions."""

from collections.abc import Callable
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request, Response

from peagle.engine.request import Request as EngineRequest
from peagle.errors import PeagleError
from peagle.models.tokenizer import ChatText
from peagle.server.answer_parsing import Parser, Piece, joined
from peagle.server.errors import ApiError
from peagle.server.harmony import Harmony
from peagle.server.logprobs import chat_logprobs
from peagle.server.protocol import ChatBody
from peagle.server.responses import Form
from peagle.server.service import Service
from peagle.server.tools import ToolUse, settle_tools
from peagle.structured.outputs import StructuredOutputs


class MessageWriter:
    """A choice that is a message: text, a thought before it, calls of functions after it."""

    def __init__(self, parser: Parser, several: bool) -> None:
        """Without `several`, calls after the first are left out."""
        self._parser, self._several = parser, several
        self._called = False

    def whole(self, text: str) -> dict[str, Any]:
        """See `Writer`."""
        delta = self._delta(joined(self._parser.push(text) + self._parser.finish()))
        calls = [{key: call[key] for key in ("id", "type", "function")} for call in delta.get("tool_calls", ())]
        message = {"role": "assistant", "content": delta.get("content", None if calls else "")}
        if "reasoning_content" in delta:
            message["reasoning_content"] = delta["reasoning_content"]
        return {"message": {**message, "tool_calls": calls} if calls else message}

    def piece(self, text: str, *, final: bool = False) -> dict[str, Any]:
        """See `Writer`."""
        pieces = self._parser.push(text)
        return {"delta": self._delta(joined(pieces + self._parser.finish()) if final else pieces)}

    def reason(self, finish_reason: str) -> str:
        """See `Writer`."""
        return "tool_calls" if finish_reason == "stop" and self._called else finish_reason

    def _delta(self, pieces: list[Piece]) -> dict[str, Any]:
        """Pieces as OpenAI's delta: an entry for each call they belong to."""
        delta: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for piece in pieces:
            if piece.call > 0 and not self._several:
                continue
            if piece.kind in ("text", "thought"):
                key = "content" if piece.kind == "text" else "reasoning_content"
                delta[key] = delta.get(key, "") + piece.text
                continue
            self._called = True
            entry = calls.setdefault(piece.call, {"index": piece.call, "function": {}})
            if piece.kind == "name":
                entry |= {"id": f"call_{uuid4().hex[:24]}", "type": "function"}
                entry["function"] = {"name": piece.text, "arguments": ""}
            else:
                entry["function"]["arguments"] = entry["function"].get("arguments", "") + piece.text
        return {**delta, "tool_calls": list(calls.values())} if calls else delta


def chat(service: Service) -> APIRouter:
    """The endpoint."""
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def _(body: ChatBody, http: Request) -> Response:
        service.check_model(body.model)
        several = body.parallel_tool_calls is not False
        style = service.style
        tools = settle_tools(body.tools, body.tool_choice, several, style.dialect, style.knows_tools)

        def render() -> ChatText:
            return service.render(body.messages, body, tools, body.reasoning_effort)

        prompt = await service.prepare(render, body, "messages")
        structure = await service.compile(_structure(service, body, tools, prompt))
        requests: list[EngineRequest] = await service.prepare(
            lambda: service.requests(body, [prompt], service.llm.max_model_len, structure, style.harmony),
            body,
            "messages",
        )
        form = _form(lambda: MessageWriter(style.parser(prompt, tools), several), style.harmony)
        return await service.answer(http, body, requests, form)

    return router


def _form(writer: Callable[[], MessageWriter], harmony: Harmony | None) -> Form:
    return Form(
        prefix="chatcmpl",
        whole_kind="chat.completion",
        chunk_kind="chat.completion.chunk",
        writer=writer,
        logprobs=chat_logprobs,
        opening={"delta": {"role": "assistant", "content": ""}},
        harmony=harmony,
    )


def _structure(
    service: Service, body: ChatBody, tools: ToolUse | None, prompt: str
) -> tuple[str, StructuredOutputs] | None:
    """What the answer must be, by the field that says so. A model that thinks may do so first."""
    asked = body.structure()
    if tools is not None:
        if asked is not None:
            raise ApiError(
                400, f"{asked[0]} beside tools: leave one of them out, or tool_choice 'none'", param=asked[0]
            )
        try:
            outputs = tools.outputs()
        except PeagleError as error:
            raise ApiError(400, f"tools: {error}", param="tools") from None
        asked = None if outputs is None else ("tools", outputs)
    if asked is None:
        return None
    name, outputs = asked
    return name, service.style.behind_thought(outputs, prompt, of_tools=tools is not None)
