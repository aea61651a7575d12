"""JSON and function calls of the demo model with its shipped head, over HTTP, by the official client."""

import json
from pathlib import Path

import pytest

from peagle.engine.engine import LLM
from tests.server.serving import serving

pytest.importorskip("xgrammar")
openai = pytest.importorskip("openai")

HEAD = Path(__file__).resolve().parents[2] / "heads" / "smollm2-135m-instruct-p-eagle"
CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "country": {"enum": ["France", "Italy", "Spain"]},
        "inhabitants": {"type": "integer", "minimum": 0, "maximum": 40_000_000},
    },
    "required": ["name", "country", "inhabitants"],
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 30}, "unit": {"type": "string", "enum": ["celsius", "kelvin"]}
            },
            "required": ["city", "unit"],
        },
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def llm() -> LLM:
    config = {"method": "eagle3", "model": str(HEAD), "num_speculative_tokens": 5, "parallel_drafting": True}
    return LLM("smollm2-135m", speculative_config=config, max_model_len=1024, max_num_seqs=4)


@pytest.fixture(scope="module")
def client(llm: LLM):
    with serving(llm) as served, openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_schema(client):
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    asked = dict(
        model="smollm2-135m", messages=[{"role": "user", "content": "Tell me about Rome as JSON."}], max_tokens=120
    )
    for temperature in (0.0, 0.8):
        answer = client.chat.completions.create(**asked, response_format=form, temperature=temperature, seed=1)
        assert answer.choices[0].finish_reason == "stop"
        city = json.loads(answer.choices[0].message.content)
        assert list(city) == CITY["required"]
        assert city["country"] in ("France", "Italy", "Spain")
        assert 0 < answer.peagle["accepted_tokens"] <= answer.peagle["draft_tokens"]


def test_a_call(client, llm: LLM):
    asked = dict(
        model="smollm2-135m", messages=[{"role": "user", "content": "What is the weather in Paris?"}], max_tokens=120,
        tools=[WEATHER], temperature=0.0, parallel_tool_calls=False,
    )  # fmt: skip
    with pytest.raises(openai.BadRequestError, match="takes no tools"):
        client.chat.completions.create(**asked)
    answer = client.chat.completions.create(**asked, tool_choice="required").choices[0]
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert arguments["unit"] in ("celsius", "kelvin")
    result = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees, sunny"}
    messages = [*asked["messages"], answer.message, result]
    further = client.chat.completions.create(**{**asked, "messages": messages, "tools": openai.NOT_GIVEN})
    assert further.choices[0].message.content
