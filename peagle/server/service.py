"""What the endpoints share: the model and its engine, and the way from a body to its answers."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Self, TypeVar

from fastapi import Request as HttpRequest
from fastapi import Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from peagle.config import ServeConfig
from peagle.engine.engine import LLM
from peagle.engine.request import Request
from peagle.errors import NoMemory, PeagleError
from peagle.models.tokenizer import ChatText, added_tokens, encode, render_chat
from peagle.server.answers import Answers
from peagle.server.chat_style import ChatStyle
from peagle.server.engine_thread import EngineThread
from peagle.server.errors import ApiError
from peagle.server.harmony import Harmony
from peagle.server.logprobs import Echo, TokenNames
from peagle.server.protocol import GenerationBody, Message, TemplateBody
from peagle.server.responses import EventStream, Form, Reply
from peagle.server.structured import Compiler
from peagle.server.tools import ToolUse
from peagle.server.trace import Trace
from peagle.structured.outputs import StructuredOutputs

T = TypeVar("T")

MAX_SCORES = 4_000_000  # log-probabilities of a response: about a gigabyte while it is written


def _one_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "peagle-prompts")


@dataclass(frozen=True, slots=True)
class Service:
    """One model behind one engine. Prompts are prepared in a thread of their own, one at a time: a long one keeps the
    event loop free, and neither tokenizer nor the draw of seeds needs a lock."""

    engine: EngineThread
    llm: LLM
    config: ServeConfig
    name: str
    names: TokenNames
    created: int = field(default_factory=lambda: int(time.time()))
    worker: ThreadPoolExecutor = field(default_factory=_one_thread)
    longest_token: int = 0  # characters
    style: ChatStyle = field(default_factory=ChatStyle)
    compiler: Compiler = field(default_factory=Compiler)

    @classmethod
    def of(cls, engine: EngineThread, llm: LLM, config: ServeConfig, name: str) -> Self:
        """A service of a loaded model."""
        longest = max(map(len, llm.tokenizer.get_vocab()))
        tokens, eos_ids = added_tokens(llm.tokenizer), llm.target.spec.eos_token_ids
        style = ChatStyle.of(llm.tokenizer.chat_template, config, tokens, eos_ids)
        return cls(engine, llm, config, name, TokenNames(llm.tokenizer), longest_token=longest, style=style)

    def check_model(self, name: str | None) -> None:
        """404 for another model than the one that is served; a body may leave it out."""
        if name is not None and name != self.name:
            message = f"model {name[:200]!r} is not served here: ask for {self.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def prepare(self, work: Callable[[], T], body: BaseModel, subject: str) -> T:
        """Run `work` in the prompts' thread. What it refuses is a 400 about the field of the body that the message
        begins with, or else about `subject`; what memory is missing for, a 503."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self.worker, work)
        except NoMemory as error:
            raise ApiError(503, str(error), code="no_memory") from error
        except PeagleError as error:
            name = str(error).split(" ", 1)[0]
            raise ApiError(400, str(error), param=name if name in type(body).model_fields else subject) from error

    def render(
        self, messages: Sequence[Message], body: TemplateBody, tools: ToolUse | None = None, effort: str | None = None
    ) -> ChatText:
        """A conversation in the model's own template, which may know nothing of functions, or of an effort to think."""
        if effort is not None and not self.style.takes_effort:
            raise PeagleError("reasoning_effort is given: the template of this model has no place for it, leave it out")
        turns = self.style.turns([message.turn() for message in messages])
        described = None
        if tools is not None:
            turns, described = tools.introduced(turns), tools.for_template()
        variables = body.chat_template_kwargs or {}
        if effort is not None and variables.setdefault("reasoning_effort", effort) != effort:
            raise PeagleError(f"reasoning_effort is {effort!r}, and another in chat_template_kwargs: give it once")
        return render_chat(
            self.llm.tokenizer, turns, add_generation_prompt=body.opens_answer, tools=described, variables=variables,
            continue_final_message=bool(body.continue_final_message),
        )  # fmt: skip

    async def compile(self, asked: tuple[str, StructuredOutputs] | None) -> StructuredOutputs | None:
        """What a field of a body asks answers to be, once its grammar is ready."""
        if asked is None:
            return None
        name, outputs = asked
        try:
            grammars = self.llm.grammars
        except PeagleError as error:
            raise ApiError(400, f"{name}: {error}", param=name) from None
        await self.compiler.compile(grammars, outputs, name)
        return outputs

    def requests(
        self,
        body: GenerationBody,
        prompts: Sequence[str | Sequence[int]],
        max_tokens: int,
        structure: StructuredOutputs | None = None,
        harmony: Harmony | None = None,
    ) -> list[Request]:
        """Every answer that a body asks for, those to the same prompt side by side. With `harmony` their text has its
        marks."""
        each = [body.sampling(choice, max_tokens) for choice in range(body.choices)]
        if harmony is not None and not body.ignore_eos:
            ends = [token for token in harmony.stop_ids if token not in self.llm.target.spec.eos_token_ids]
            each = [replace(params, stop_token_ids=(*params.stop_token_ids, *ends)) for params in each]
        marks = None if harmony is None else harmony.marks
        if structure is not None:
            each = [replace(params, structured_outputs=structure) for params in each]
        room = self.llm.core.max_num_seqs + self.config.max_waiting
        if len(each) * len(prompts) > room:
            raise PeagleError(
                f"n is {len(each)} for {len(prompts)} prompts: this server takes {room} answers at once, ask for fewer"
            )
        made = []
        for number, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                self.check_length(prompt)
                prompt = encode(self.llm.tokenizer, prompt, body.add_special_tokens)  # once for all
            made += [self.engine.make_request(prompt, params, index=number, marks=marks) for params in each]
        _check_scores(made)
        return made

    def check_length(self, text: str) -> None:
        """PeagleError for a text that cannot fit, however it is cut into tokens: to find out how takes seconds."""
        if len(text) > self.llm.max_model_len * self.longest_token:
            raise PeagleError(
                f"the prompt has {len(text)} characters, more than {self.llm.max_model_len} tokens hold: shorten it"
            )

    def echo(self, prompt: str | Sequence[int], request: Request) -> Echo:
        """The prompt as text, however it was given; where its tokens lie in it if the request needs that."""
        text = prompt if isinstance(prompt, str) else str(self.llm.tokenizer.decode(list(prompt)))
        return Echo(text, () if request.prompt_logprobs is None else self.names.ends(request.prompt_ids, text))

    async def answer(
        self,
        http: HttpRequest,
        body: GenerationBody,
        requests: Sequence[Request],
        form: Form,
        echoes: Sequence[Echo] = (),
    ) -> Response:
        """Have the requests run; the whole answer or a stream of it."""
        echoes = echoes or [Echo()] * len(requests)
        reply = Reply(form, self.name, requests, body.choices, echoes, body.wants_usage, self.names)
        answers = Answers(self.engine, requests, reply.id, http.receive, self.config.request_timeout)
        if body.stream:
            traces = [Trace(self.llm.tokenizer, form.harmony) for _ in requests] if body.wants_trace else []
            return EventStream(reply, answers, traces)
        outputs = await answers.outputs()
        if any(request.logprobs is not None for request in requests):  # long to write: others are not to wait
            return await asyncio.to_thread(lambda: JSONResponse(reply.whole(outputs)))
        return JSONResponse(reply.whole(outputs))


def _check_scores(requests: Sequence[Request]) -> None:
    """PeagleError for more log-probabilities, of prompts and of answers, than a response can hold."""
    count = 0
    for request in requests:
        asked = (len(request.prompt_ids), request.params.prompt_logprobs), (request.max_tokens, request.params.logprobs)
        count += sum(length * (1 + likeliest) for length, likeliest in asked if likeliest is not None)
    if count > MAX_SCORES:
        raise PeagleError(
            f"logprobs ask for up to {count} log-probabilities: {MAX_SCORES} is the most, so lower max_tokens, n or "
            "how many there are for each token, or send fewer prompts"
        )
