"""The description at /openapi.json, and schemathesis with it against the endpoints."""

import pytest
import schemathesis
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from peagle.config import ServeConfig
from peagle.server.app import make_app
from peagle.server.metrics import Metrics
from tests.server.serving import chat_llm, started

# Not among them: that all data which fit the schema are accepted. Tokens and lengths depend on the model.
CHECKS = (
    not_a_server_error, checks.status_code_conformance, checks.content_type_conformance,
    checks.response_schema_conformance, checks.response_headers_conformance, checks.negative_data_rejection,
)  # fmt: skip
SHORT = {"n": 2, "max_tokens": 3}
OPERATIONS = (
    "POST /v1/completions", "POST /v1/chat/completions", "GET /v1/models", "GET /v1/models/{name}", "POST /tokenize",
    "POST /detokenize", "GET /health", "GET /ping", "GET /load", "GET /version", "GET /metrics",
)  # fmt: skip


@pytest.fixture(scope="module")
def app():
    llm, config, metrics = chat_llm(), ServeConfig(), Metrics("tiny")
    with started(llm, config, metrics) as engine:
        yield make_app(engine, llm, config, metrics)
        assert engine.failure is None
        assert engine.snapshot().num_running == engine.snapshot().num_waiting == 0
        assert llm.core.scheduler.pool.num_free == llm.core.scheduler.pool.num_blocks


@pytest.fixture(scope="module")
def operations(app):
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    return {result.ok().label: result.ok() for result in schema.get_all_operations()}


def test_every_endpoint_is_described(app, operations):
    assert set(operations) == set(OPERATIONS)
    document = TestClient(app).get("/openapi.json").json()
    for methods in document["paths"].values():
        for described in methods.values():
            assert described["operationId"].isidentifier()
            assert not described["operationId"].startswith("_")
            assert "422" not in described["responses"]
    assert "HTTPValidationError" not in document["components"]["schemas"]
    assert "securitySchemes" not in document["components"]


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("label", OPERATIONS)
def test_schemathesis(operations, label, mode):
    operation = operations[label]
    if mode is GenerationMode.NEGATIVE and not operation.body:
        pytest.skip("there is nothing to get wrong")

    @settings(
        max_examples=40 if operation.body else 5, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck), database=None,
    )  # fmt: skip
    @given(operation.as_strategy(generation_mode=mode))
    def attack(case):
        if mode is GenerationMode.POSITIVE and label.endswith("completions"):
            case.body = {**case.body, **SHORT}  # a hundred answers of all the context take longer than the client waits
        case.call_and_validate(checks=CHECKS)

    attack()


def test_a_key_is_described_and_asked_for():
    llm, config = chat_llm(), ServeConfig(api_key="k")
    with started(llm, config) as engine:
        app = make_app(engine, llm, config)
        document = TestClient(app, headers={"authorization": "Bearer k"}).get("/openapi.json").json()
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    locked = {path for path, methods in document["paths"].items() for m in methods.values() if m.get("security")}
    assert locked == {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/v1/models/{name}",
        "/tokenize",
        "/detokenize",
    }
    assert all("401" in m["responses"] for path in locked for m in document["paths"][path].values())
    assert "401" not in document["paths"]["/health"]["get"]["responses"]
