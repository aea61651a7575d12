"""The bodies of requests. A field that is not listed is refused by name, never ignored."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from peagle.sampling import MAX_LOGPROBS, SamplingParams
from peagle.server.body import Body
from peagle.server.errors import ApiError, shown
from peagle.server.structured import StructuredFields
from peagle.server.tools import MAX_TOOLS, NamedTool, Tool, ToolCall

MAX_CHOICES = 128  # answers of one request: prompts times n
MAX_MESSAGES, MAX_BIASES = 10_000, 10_000
MAX_STOPS, MAX_STOP_LENGTH, MAX_STOP_IDS = 32, 256, 1024  # each is looked for after every token

Text = Annotated[str, Field(max_length=MAX_STOP_LENGTH)]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Prompt = (
    str
    | TokenIds
    | Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
)
# Fields of OpenAI and vLLM that are not supported -> the values besides null that ask for nothing.
_NOT_SUPPORTED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "best_of": (1,), "prompt_logprobs": (), "min_tokens": (0,), "length_penalty": (1, 1.0),
        "use_beam_search": (False,), "truncate_prompt_tokens": (), "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,), "bad_words": ([],), "allowed_token_ids": (), "priority": (0,),
        "guided_decoding_backend": ("auto", "xgrammar"),
    }
)  # fmt: skip
_NOT_SUPPORTED_CHAT: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "functions": ([],), "function_call": ("none",), "modalities": (["text"],), "audio": (), "prediction": (),
        "verbosity": (), "web_search_options": (), "chat_template": (), "documents": ([],), "echo": (False,),
        "mm_processor_kwargs": ({},),
    }
)  # fmt: skip
_SAMPLING = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output",
)  # fmt: skip


class StreamOptions(Body):
    """What a stream carries besides text."""

    not_supported = MappingProxyType({"continuous_usage_stats": (False,), "include_obfuscation": (False,)})
    include_usage: bool | None = None


class SpeculationOptions(Body):
    """Field `peagle`: what a request may say about drafts. No token of the answer depends on it."""

    trace: bool | None = None  # a stream says of each token where it came from
    drafts: bool | None = None  # false: none, in steps that no other request shares


class GenerationBody(StructuredFields):
    """What chat and completions have in common."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_BIASES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None  # the tokenizer's, such as BOS, to the prompt
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    peagle: SpeculationOptions | None = None
    # What clients of OpenAI send, and no answer depends on. Nothing is stored.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _check_size(cls, bias: Any) -> Any:
        if isinstance(bias, dict) and len(bias) > MAX_BIASES:  # before each entry is looked at
            message = f"logit_bias has {len(bias)} entries: give {MAX_BIASES} at most"
            raise ApiError(400, message, param="logit_bias")
        return bias

    @model_validator(mode="after")
    def _check_stream(self) -> "GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream true: leave one of them out", param="stream_options")
        if self.wants_trace and not self.stream:
            raise ApiError(400, "peagle.trace needs stream true: leave one of them out", param="peagle")
        return self

    @property
    def choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_trace(self) -> bool:
        """Whether the chunks of a stream say where each token came from."""
        return bool(self.peagle and self.peagle.trace)

    @property
    def wants_drafts(self) -> bool:
        """False for a request that is to be decoded plainly where that is no loss to others."""
        return self.peagle is None or self.peagle.drafts is not False

    def sampling(self, choice: int, max_tokens: int) -> SamplingParams:
        """How answer number `choice` of a prompt is sampled; `max_tokens` if the body does not say."""
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        # As in vLLM -1 is no seed. Seeds are whole numbers below 2^63, the first again behind the last.
        seed = None if self.seed in (None, -1) else (self.seed + choice) % 2**63
        shown = {"show_drafts": self.wants_trace, "drafts": self.wants_drafts, **self.scores()}
        return SamplingParams(**({"max_tokens": max_tokens} | given | shown), seed=seed)

    def scores(self) -> dict[str, Any]:
        """Which log-probabilities are asked for, in the words of `SamplingParams`."""
        return {}


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    not_supported = MappingProxyType({**_NOT_SUPPORTED, "suffix": ("",)})
    prompt: Prompt
    echo: bool | None = None
    logprobs: TopLogprobs | None = None

    @field_validator("logprobs", mode="before")
    @classmethod
    def _accept_false(cls, logprobs: Any) -> Any:
        return None if logprobs is False else logprobs

    def scores(self) -> dict[str, Any]:
        """`echo` asks for those of the prompt too."""
        return {"logprobs": self.logprobs, "prompt_logprobs": self.logprobs if self.echo else None}

    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one."""
        one = isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int)
        return [self.prompt] if one else self.prompt  # type: ignore[list-item,return-value]  # as `Prompt` says


class Message(Body):
    """One turn of a conversation; the parts of its content are joined by line ends."""

    not_supported = MappingProxyType({"refusal": (), "audio": (), "function_call": (), "annotations": ([],)})
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    name: Text | None = None  # for the template
    reasoning_content: str | None = None  # of an answer before; most templates leave out what was thought

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        if not content:
            raise ApiError(400, "messages holds an empty list of parts: give at least one", param="messages")
        for part in content:
            if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
                kind = part.get("type") if isinstance(part, dict) else part
                message = (
                    f"messages holds a part of type {shown(kind)}: only parts with type 'text' and text are supported"
                )
                raise ApiError(400, message, param="messages")
            if unknown := sorted(set(part) - {"type", "text"}):
                raise ApiError(400, f"messages holds a part with {shown(unknown[0])}: leave it out", param="messages")
        return "\n".join(part["text"] for part in content)

    @model_validator(mode="after")
    def _check_role(self) -> "Message":
        if self.content is None and not self.tool_calls:
            raise ApiError(400, "messages holds one without content: every message needs a text", param="messages")
        for name, role in (("tool_calls", "assistant"), ("reasoning_content", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, name) and self.role != role:
                message = f"messages holds {name} in the role {self.role!r}: only {role!r} has any"
                raise ApiError(400, message, param="messages")
        return self

    def turn(self) -> dict[str, Any]:
        """The message as chat templates take it, most of which know no developer."""
        role = "system" if self.role == "developer" else self.role
        turn: dict[str, Any] = {"role": role, "content": self.content or ""}
        if self.tool_calls:
            turn["tool_calls"] = [call.for_template() for call in self.tool_calls]
        turn |= {key: value for key in ("name", "tool_call_id") if (value := getattr(self, key))}
        if self.reasoning_content:
            turn["thinking"] = self.reasoning_content
        return turn


class TemplateBody(Body):
    """How a conversation is put into the model's template."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool | None = None  # false: nothing opens the answer
    continue_final_message: bool | None = None  # the answer goes on where the last message ends
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_end(self) -> "TemplateBody":
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message with add_generation_prompt: the text ends in one way, give one of them"
            raise ApiError(400, message, param="continue_final_message")
        return self

    @property
    def opens_answer(self) -> bool:
        """Whether the template opens the answer, as it does unless told."""
        return not self.continue_final_message and self.add_generation_prompt is not False


class ChatBody(GenerationBody, TemplateBody):
    """POST /v1/chat/completions."""

    not_supported = MappingProxyType({**_NOT_SUPPORTED, **_NOT_SUPPORTED_CHAT})
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            message = f"top_logprobs is {self.top_logprobs} without logprobs: set logprobs to true, or leave both out"
            raise ApiError(400, message, param="top_logprobs")
        return self

    def scores(self) -> dict[str, Any]:
        """`logprobs` alone asks for the tokens' own."""
        return {"logprobs": (self.top_logprobs or 0) if self.logprobs else None}

    @model_validator(mode="after")
    def _settle_max_tokens(self) -> "ChatBody":
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                one, other = shown(self.max_tokens), shown(self.max_completion_tokens)
                message = f"max_tokens is {one} and max_completion_tokens {other}: give one"
                raise ApiError(400, message, param="max_tokens")
            self.max_tokens = self.max_completion_tokens
        return self


class TokenizeBody(TemplateBody):
    """POST /tokenize: a text, or a conversation in its template."""

    not_supported = MappingProxyType({"return_token_strs": (False,)})
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _check_one(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "prompt and messages: give one of the two", param="prompt")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds
