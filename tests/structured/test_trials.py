"""Trials of grammars: what hangs, eats memory or dies costs its own request alone, and nothing outlives the server."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from peagle.errors import PeagleError, Unavailable
from peagle.structured.grammars import Grammars
from peagle.structured.outputs import StructuredOutputs
from peagle.structured.trials import Trials
from peagle.structured.vocabulary import Vocabulary
from tests.structured.tiny_json import HANGING, json_tokenizer, process_group

pytest.importorskip("xgrammar")
WIDE = StructuredOutputs(json={"properties": {f"p{i}": {"type": "string"} for i in range(1500)}})
_ORPHANS = """
import sys, threading, time
from peagle.structured.grammars import Grammars
from peagle.structured.outputs import StructuredOutputs
from peagle.structured.trials import Trials
from peagle.structured.vocabulary import Vocabulary
from tests.structured.tiny_json import HANGING, json_tokenizer
vocabulary = Vocabulary.of(json_tokenizer(), 96, (1,))
trials = Trials(vocabulary, seconds=60.0)
grammars = Grammars(vocabulary, trials)
grammars.compile(StructuredOutputs(regex="a"))
threading.Thread(target=grammars.compile, args=(StructuredOutputs(regex=HANGING),), daemon=True).start()
print(trials.pid, flush=True)
time.sleep(60)
"""


def vocabulary() -> Vocabulary:
    return Vocabulary.of(json_tokenizer(), 96, (1,))


@pytest.fixture(scope="module")
def trials() -> Iterator[Trials]:
    with Trials(vocabulary(), seconds=3.0) as trials:
        run(trials, StructuredOutputs(regex="a"))  # it is up
        yield trials


def run(trials: Trials, asked: StructuredOutputs) -> None:
    trials.run(asked.kind, json.dumps(asked.format()))


def gone(pid: int, seconds: float = 10.0) -> bool:
    until = time.perf_counter() + seconds
    while process_group(pid) and time.perf_counter() < until:
        time.sleep(0.02)
    return not process_group(pid)


def test_errors_are_those_of_this_process(trials):
    here, apart = Grammars(vocabulary()), Grammars(vocabulary(), trials)
    for asked in (
        StructuredOutputs(regex="(a"), StructuredOutputs(grammar="root ::= nobody"), StructuredOutputs(choice=["é"]),
        StructuredOutputs(json={"type": "integer", "minimum": 5, "maximum": 3}),
    ):  # fmt: skip
        said = []
        for grammars in (here, apart):
            with pytest.raises(PeagleError) as error:
                grammars.compile(asked)
            said.append(str(error.value))
        assert said[0] == said[1]
    asked = StructuredOutputs(regex="[ab]{3}x")
    matchers = here.matcher(asked), apart.matcher(asked)
    for token in json_tokenizer().encode("abax"):
        assert all(matcher.accept(token) for matcher in matchers)


def test_what_hangs_is_ended_and_others_go_on_meanwhile(trials):
    grammars, said = Grammars(vocabulary(), trials), []

    def hang() -> None:
        with pytest.raises(PeagleError) as error:
            grammars.compile(StructuredOutputs(regex=HANGING))
        said.append(str(error.value))

    hanging = [threading.Thread(target=hang) for _ in range(3)]
    for thread in hanging:
        thread.start()
    number = 0
    while not said:
        grammars.compile(StructuredOutputs(regex=f"b{number}"))
        number += 1
    assert number > 2, "the good ones waited for those that hang"
    for thread in hanging:
        thread.join()
    assert said == ["regex takes more than 3 seconds to compile: use a simpler one"] * 3
    began = time.perf_counter()
    hang()  # refused at once: it is known
    assert time.perf_counter() - began < 2
    until = time.perf_counter() + 10
    while len(process_group(trials.pid)) > 1:
        assert time.perf_counter() < until, "a trial went on behind its limit"
        time.sleep(0.02)


def test_a_refusal_is_forgotten_after_a_while(monkeypatch, trials):
    monkeypatch.setattr("peagle.structured.grammars.REFUSED_SECONDS", 0.0)
    grammars, asked = Grammars(vocabulary(), trials), StructuredOutputs(regex="[xy]")
    monkeypatch.setattr(trials, "run", lambda kind, form: (_ for _ in ()).throw(PeagleError("no")))
    with pytest.raises(PeagleError, match="no"):
        grammars.compile(asked)
    monkeypatch.undo()
    assert grammars.compile(asked) is grammars.compile(asked)


def test_that_no_process_was_there_is_not_remembered_as_a_refusal():
    class Busy:
        def run(self, kind: str, form: str) -> None:
            raise Unavailable("no process")

    grammars, asked = Grammars(vocabulary(), Busy()), StructuredOutputs(regex="a")
    for _ in range(2):
        with pytest.raises(Unavailable):
            grammars.compile(asked)
    grammars.trials = None
    assert grammars.compile(asked) is not None


def test_memory_is_limited():
    with Trials(vocabulary(), max_bytes=6 * 2**20) as trials:
        with pytest.raises(
            PeagleError,
            match="json takes more than 6 MiB of memory to compile, or crashes the compiler: use a simpler one",
        ):
            run(trials, WIDE)
        run(trials, StructuredOutputs(regex="a"))


def test_a_trial_that_is_killed_costs_one_request(trials):
    said = []

    def hang() -> None:
        with pytest.raises(PeagleError) as error:
            run(trials, StructuredOutputs(regex=HANGING))
        said.append(str(error.value))

    thread, before = threading.Thread(target=hang), set(process_group(trials.pid))
    thread.start()
    while not (children := set(process_group(trials.pid)) - before):
        time.sleep(0.01)
    time.sleep(0.5)  # it is at work
    os.kill(children.pop(), signal.SIGKILL)
    run(trials, StructuredOutputs(regex="a"))
    thread.join()
    assert said == ["regex takes more than 1,024 MiB of memory to compile, or crashes the compiler: use a simpler one"]


def test_kept_grammars_take_limited_memory(monkeypatch):
    grammars = Grammars(vocabulary())
    size = grammars.compile(StructuredOutputs(regex="a0")).memory_size_bytes
    monkeypatch.setattr("peagle.structured.grammars.MOST_KEPT_BYTES", 4 * size)
    for i in range(1, 10):
        grammars.compile(StructuredOutputs(regex=f"a{i}"))
    assert [i for i in range(10) if grammars.kept(StructuredOutputs(regex=f"a{i}"))] == [6, 7, 8, 9]
    grammars.compile(WIDE)  # larger than all that may be kept: it is, alone
    assert grammars.kept(WIDE)
    assert not grammars.kept(StructuredOutputs(regex="a9"))


def test_a_ready_process_that_is_ended_comes_again(trials):
    before = trials.pid
    os.kill(before, signal.SIGKILL)
    run(trials, StructuredOutputs(regex="a"))
    assert trials.pid != before
    assert gone(before)


@pytest.mark.parametrize("program", ["/bin/false", "/nowhere"])
def test_where_no_process_starts(program, monkeypatch):
    trials = Trials(vocabulary())
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", program)
        trials.start()
        with pytest.raises(Unavailable, match="no process can be started"):
            run(trials, StructuredOutputs(regex="a"))
    with trials:  # now there is one
        run(trials, StructuredOutputs(regex="a"))


def test_the_end_comes_at_once():
    """With a trial that hangs under way, whose request hears of it."""
    trials, said = Trials(vocabulary(), seconds=60.0), []
    run(trials, StructuredOutputs(regex="a"))
    pid = trials.pid

    def hang() -> None:
        with pytest.raises(Unavailable) as error:
            run(trials, StructuredOutputs(regex=HANGING))
        said.append(str(error.value))

    thread = threading.Thread(target=hang)
    thread.start()
    while len(process_group(pid)) < 2:
        time.sleep(0.01)
    trials.close()
    thread.join(5)
    assert said == ["the server is shutting down: send the request to another one, or later"]
    assert gone(pid)
    trials.close()  # once more does no harm
    with pytest.raises(Unavailable, match="shutting down"):
        run(trials, StructuredOutputs(regex="a"))


def test_nothing_outlives_a_server_that_is_killed():
    server = subprocess.Popen([sys.executable, "-c", _ORPHANS], stdout=subprocess.PIPE, text=True)
    pid = int(server.stdout.readline())
    while len(process_group(pid)) < 2:
        time.sleep(0.01)
    server.kill()
    server.communicate()
    assert gone(pid)
