"""The HTTP application: `make_app` puts the endpoints together."""

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, Response
from fastapi.middleware.cors import CORSMiddleware

from peagle import __version__
from peagle.config import ServeConfig
from peagle.engine.engine import LLM
from peagle.errors import PeagleError
from peagle.models.tokenizer import encode
from peagle.server.chat import chat
from peagle.server.completions import completions
from peagle.server.engine_thread import EngineThread
from peagle.server.errors import ApiError, add_error_handlers, shown
from peagle.server.guard import Guard
from peagle.server.openapi import describe
from peagle.server.protocol import DetokenizeBody, TokenizeBody
from peagle.server.service import Service
from peagle.server.tools import settle_tools
from peagle.server.web import page

if TYPE_CHECKING:
    from peagle.server.metrics import Metrics


def make_app(engine: EngineThread, llm: LLM, config: ServeConfig, metrics: "Metrics | None" = None) -> FastAPI:
    """The endpoints over a started engine, which its caller stops. Without `metrics` there is no /metrics."""
    name = config.served_model_name or llm.target.name
    service = Service.of(engine, llm, config, name)

    # The pages with documentation would load scripts from elsewhere; /openapi.json has it all.
    app = FastAPI(title="peagle", version=__version__, docs_url=None, redoc_url=None)
    for router in (completions(service), chat(service), _about(service), _tokens(service)):
        app.include_router(router)
    if config.page:
        app.include_router(page())
    if metrics is not None:
        app.include_router(_metrics(metrics))
    add_error_handlers(app)
    describe(app, has_key=config.api_key is not None)
    app.add_middleware(
        Guard,
        api_key=config.api_key,
        host=config.host,
        allowed_origins=config.allowed_origins,
        body_seconds=config.receive_timeout,
    )
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=config.allowed_origins, allow_methods=["*"], allow_headers=["*"]
        )
    return app


def _about(service: Service) -> APIRouter:
    """What the server is, and whether it can be used."""
    router = APIRouter()
    model = {
        "id": service.name, "object": "model", "created": service.created, "owned_by": "peagle",
        "max_model_len": service.llm.max_model_len,
    }  # fmt: skip

    @router.get("/v1/models")
    async def _() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @router.get("/v1/models/{name:path}")
    async def _(name: str) -> dict[str, Any]:
        service.check_model(name)
        return model

    @router.get("/ping")
    @router.get("/health")
    async def _() -> Response:
        if not service.engine.is_ready:
            raise ApiError(503, "not ready: a request would not be answered now", headers={"Retry-After": "1"})
        return Response()

    @router.get("/load")
    async def _() -> dict[str, int]:
        now = service.engine.snapshot()
        return {"server_load": now.num_running + now.num_waiting}

    @router.get("/version")
    async def _() -> dict[str, str]:
        return {"version": __version__}

    return router


def _tokens(service: Service) -> APIRouter:
    """Text to tokens and back, as the model sees it."""
    router, tokenizer = APIRouter(), service.llm.tokenizer

    @router.post("/tokenize")
    async def _(body: TokenizeBody) -> dict[str, Any]:
        service.check_model(body.model)

        # What is chosen among the tools changes no prompt, and a call that must be is one that every model can make.
        style = service.style
        tools = settle_tools(body.tools, "required" if body.tools else None, True, style.dialect, style.knows_tools)

        def tokenize() -> list[int]:
            text = body.prompt or "" if body.messages is None else service.render(body.messages, body, tools)
            service.check_length(text)
            return encode(tokenizer, text, body.add_special_tokens)

        tokens = await service.prepare(tokenize, body, "prompt" if body.messages is None else "messages")
        return {"tokens": tokens, "count": len(tokens), "max_model_len": service.llm.max_model_len}

    @router.post("/detokenize")
    async def _(body: DetokenizeBody) -> dict[str, str]:
        service.check_model(body.model)
        vocab_size = service.llm.target.spec.vocab_size

        def detokenize() -> str:
            length, most = len(body.tokens), service.llm.max_model_len
            if length > most:
                raise PeagleError(f"tokens has {length} tokens: the context is {most}, send less")
            outside = [token for token in body.tokens if not 0 <= token < vocab_size]
            if outside:
                raise PeagleError(f"tokens has {shown(outside[0])}: the model has tokens 0 .. {vocab_size - 1}")
            return str(tokenizer.decode(body.tokens))

        return {"prompt": await service.prepare(detokenize, body, "tokens")}

    return router


def _metrics(metrics: "Metrics") -> APIRouter:
    router = APIRouter()

    @router.get("/metrics")
    def _() -> Response:  # in a thread: it takes a while
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router
