"""POST /v1/completions."""

from fastapi import APIRouter, Request, Response

from peagle.engine.request import Request as EngineRequest
from peagle.server.errors import ApiError
from peagle.server.logprobs import Echo, completion_logprobs
from peagle.server.protocol import MAX_CHOICES, CompletionBody
from peagle.server.responses import Form
from peagle.server.service import Service

DEFAULT_MAX_TOKENS = 16  # OpenAI's
_FORM = Form(
    prefix="cmpl",
    whole_kind="text_completion",
    chunk_kind="text_completion",
    whole=lambda text: {"text": text},
    piece=lambda text: {"text": text},
    logprobs=completion_logprobs,
)


def completions(service: Service) -> APIRouter:
    """The endpoint."""
    router = APIRouter()

    @router.post("/v1/completions")
    async def _(body: CompletionBody, http: Request) -> Response:
        service.check_model(body.model)
        prompts = body.prompts()
        count = len(prompts) * body.choices
        if count > MAX_CHOICES:
            message = f"{len(prompts)} prompts with n {body.choices} are {count} answers: ask for {MAX_CHOICES} at most"
            raise ApiError(400, message, param="n" if body.choices > 1 else "prompt")

        def prepare() -> tuple[list[EngineRequest], list[Echo]]:
            requests = service.requests(body, prompts, DEFAULT_MAX_TOKENS)
            of_prompts = zip(prompts, requests[:: body.choices], strict=True) if body.echo else ()
            echoes = [service.echo(prompt, request) for prompt, request in of_prompts]
            return requests, [echo for echo in echoes for _ in range(body.choices)]

        requests, echoes = await service.prepare(prepare, body, "prompt")
        return await service.answer(http, body, requests, _FORM, echoes)

    return router
