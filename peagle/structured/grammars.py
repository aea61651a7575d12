"""Grammars by xgrammar: compiled for a model's vocabulary, kept for the next request that asks for the same."""

import json
import threading
import time
from collections import OrderedDict
from typing import Any

from peagle.errors import PeagleError, Unavailable
from peagle.structured.outputs import StructuredOutputs
from peagle.structured.trials import Trials
from peagle.structured.vocabulary import GrammarMatcher, Vocabulary

MOST_KEPT = 128  # compiled grammars, and as many that were refused
MOST_KEPT_BYTES = 512 * 2**20
REFUSED_SECONDS = 60.0


class Grammars:
    """The grammars of one model; from any thread.

    With `trials`, each is first compiled and tried out in a process that can be stopped. What passed is compiled again
    here: that takes less than a tenth of the time that sending the result would.
    """

    def __init__(self, vocabulary: Vocabulary, trials: Trials | None = None) -> None:
        self.vocabulary, self.trials = vocabulary, trials
        self._kept: OrderedDict[StructuredOutputs, Any] = OrderedDict()
        self._refused: OrderedDict[StructuredOutputs, tuple[float, str]] = OrderedDict()
        self._bytes = 0  # of those that are kept
        self._lock = threading.Lock()

    def kept(self, asked: StructuredOutputs) -> Any | None:
        """The grammar if it is there. PeagleError if it was refused less than a minute ago: to find out again takes as
        long as it did the first time."""
        with self._lock:
            until, why = self._refused.get(asked, (0.0, ""))
            if time.monotonic() < until:
                raise PeagleError(why)
            if asked in self._kept:
                self._kept.move_to_end(asked)
            return self._kept.get(asked)

    def compile(self, asked: StructuredOutputs) -> Any:
        """The grammar; PeagleError that says what is wrong with it."""
        if (compiled := self.kept(asked)) is not None:
            return compiled
        try:
            compiled = self._make(asked.kind, json.dumps(asked.format()))
        except Unavailable:
            raise
        except PeagleError as error:
            self._refuse(asked, str(error))
            raise
        self._keep(asked, compiled)
        return compiled

    def matcher(self, asked: StructuredOutputs) -> GrammarMatcher:
        """A fresh matcher at the beginning of the grammar."""
        return self.vocabulary.matcher(self.compile(asked))

    def _make(self, kind: str, form: str) -> Any:
        if self.trials is not None:
            self.trials.run(kind, form)
            return self.vocabulary.compile(kind, form)
        compiled = self.vocabulary.compile(kind, form)
        self.vocabulary.try_out(compiled, kind)
        return compiled

    def _keep(self, asked: StructuredOutputs, compiled: Any) -> None:
        with self._lock:
            if asked in self._kept:  # another thread was faster
                return
            self._kept[asked] = compiled
            self._bytes += compiled.memory_size_bytes
            while len(self._kept) > MOST_KEPT or (self._bytes > MOST_KEPT_BYTES and len(self._kept) > 1):
                self._bytes -= self._kept.popitem(last=False)[1].memory_size_bytes

    def _refuse(self, asked: StructuredOutputs, why: str) -> None:
        with self._lock:
            self._refused[asked] = time.monotonic() + REFUSED_SECONDS, why
            while len(self._refused) > MOST_KEPT:
                self._refused.popitem(last=False)
