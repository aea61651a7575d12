"""`peagle bench serve` against `peagle serve`: two views of the same requests."""

import httpx
from rich.console import Console

from peagle.bench.counters import parse_counters
from peagle.bench.serve import measure
from peagle.bench.settings import BenchServeConfig
from tests.server.serving import chat_llm, serving


def test_acceptance_is_the_servers_own():
    with serving(chat_llm()) as served:
        config = BenchServeConfig(
            base_url=served.url, dataset_name="random", num_prompts=6, random_input_len=8, random_output_len=24,
            random_vocab_size=90, max_concurrency=3, ignore_eos=True,
        )  # fmt: skip
        measured = measure(config, Console(quiet=True))
        counters = parse_counters(httpx.get(f"{served.url}/metrics").text)
    row = measured.results(config)["rows"][0]
    assert (row["completed"], row["failures"]) == (6, {})
    assert (row["output_tokens"], row["prompt_tokens"]) == (6 * 24, 6 * 8)
    assert row["tokens_from"] == "usage"
    found = row["acceptance"]
    assert found["source"] == "requests"
    counted = (counters.rounds, counters.drafted, counters.accepted)
    assert (found["rounds"], found["draft_tokens"], found["accepted_tokens"]) == counted
    assert found["rounds"] > 0
    assert found["acceptance_length"] == 1 + counters.accepted / counters.rounds


def test_a_conversation(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "hello"}\n{"prompt": "there"}\n')
    with serving(chat_llm()) as served:
        config = BenchServeConfig(
            base_url=served.url, dataset_name="custom", dataset_path=str(path), output_len=8, ignore_eos=True,
            temperature=0.7, request_seeds=True,
        )  # fmt: skip
        row = measure(config, Console(quiet=True)).results(config)["rows"][0]
    assert (row["failures"], row["completed"], row["output_tokens"]) == ({}, 2, 16)


def test_a_stream_with_a_trace(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "hello"}\n')
    with serving(chat_llm()) as served:
        config = BenchServeConfig(
            base_url=served.url, dataset_name="custom", dataset_path=str(path), output_len=8, ignore_eos=True,
            extra_body='{"peagle": {"trace": true}}',
        )  # fmt: skip
        row = measure(config, Console(quiet=True)).results(config)["rows"][0]
    assert (row["failures"], row["output_tokens"], row["acceptance"]["source"]) == ({}, 8, "requests")
