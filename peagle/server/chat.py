"""POST /v1/chat/completions."""

from fastapi import APIRouter, Request, Response

from peagle.engine.request import Request as EngineRequest
from peagle.models.tokenizer import render_chat
from peagle.server.logprobs import chat_logprobs
from peagle.server.protocol import ChatBody
from peagle.server.responses import Form
from peagle.server.service import Service

_FORM = Form(
    prefix="chatcmpl",
    whole_kind="chat.completion",
    chunk_kind="chat.completion.chunk",
    whole=lambda text: {"message": {"role": "assistant", "content": text}},
    piece=lambda text: {"delta": {"content": text} if text else {}},
    logprobs=chat_logprobs,
    opening={"delta": {"role": "assistant", "content": ""}},
)


def chat(service: Service) -> APIRouter:
    """The endpoint."""
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def _(body: ChatBody, http: Request) -> Response:
        service.check_model(body.model)

        def prepare() -> list[EngineRequest]:
            prompt = render_chat(service.llm.tokenizer, body.conversation(), add_generation_prompt=True)
            return service.requests(body, [prompt], service.llm.max_model_len)

        requests = await service.prepare(prepare, body, "messages")
        return await service.answer(http, body, requests, _FORM)

    return router
