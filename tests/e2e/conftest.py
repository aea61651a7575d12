"""The real server as a process, started by the command line that people use, with SmolLM2 and its head on the CPU."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.e2e.test_shipped_head import HEAD
from tests.test_cli import environment

MODEL = "smollm2-135m"
SPECULATION = {"method": "eagle3", "model": str(HEAD), "num_speculative_tokens": 5, "parallel_drafting": True}


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """Its address. All tests share one: it takes seconds to start."""
    command = [sys.executable, "-m", "peagle", "serve", MODEL, "--speculative-config", json.dumps(SPECULATION)]
    command += ["--port", "0", "--max-model-len", "512", "--max-num-seqs", "4"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment(COLUMNS="200")) as process:
        assert process.stderr is not None
        try:
            said = []
            while not (found := re.search(r"listening at (\S+)/v1", said[-1] if said else "")):
                said.append(process.stderr.readline())
                assert said[-1], said
            yield found[1]
            assert process.poll() is None, "the server ended under the tests"
        finally:
            process.kill()


@pytest.fixture(scope="session")
def client(server: str) -> Iterator[OpenAI]:
    """The official client, without its retries: what fails once is to be seen."""
    with OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
        yield client
