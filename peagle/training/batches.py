"""From documents to training steps: hold-out split, shuffled epochs, packing, COD draws, and a thread that runs ahead.

Everything is a function of (seed, epoch, step): a resumed run sees the same batches as one that never stopped.
"""

import dataclasses
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peagle.errors import PeagleError
from peagle.training.features import FeatureIndex, FeatureSource
from peagle.training.rows import Packed, RowLayout, Rows, TokenDocument, draw_rows, pack_documents

PREFETCHED = 4
# The second word of a Philox key. COD draws use the step number, which stays below; other purposes count from here.
_SHUFFLE_KEYS = 1 << 62
_HOLDOUT_KEY = 1 << 63
_WORD = (1 << 64) - 1

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One training step's input; shapes are static except `rows.live_L`."""

    epoch: int
    index: int  # pack number within the epoch
    positions: int  # packed positions that are not padding
    input_ids_P: Tensor
    labels_P: Tensor
    features: FeatureIndex
    rows: Rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A place in the data order: the next pack is number `index` of `epoch`, for optimiser step `step` (0-based)."""

    step: int = 0
    epoch: int = 0
    index: int = 0


def generator(seed: int, word: int) -> np.random.Generator:
    """Counter-based generator number `word` of a seed."""
    return np.random.Generator(np.random.Philox(key=np.array([seed & _WORD, word & _WORD], np.uint64)))


def map_tensors(value: T, change: Callable[[Tensor], Tensor]) -> T:
    """A copy of a dataclass with `change` applied to every tensor inside it."""
    if isinstance(value, Tensor):
        return change(value)  # type: ignore[return-value]  # a Tensor in, a Tensor out
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: map_tensors(getattr(value, field.name), change) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value


def has_rows(document: TokenDocument, positions: int | None = None) -> bool:
    """Whether a document has a supervised position (token i + 1 of the first L - 2) among its first `positions`."""
    supervised = document.loss_mask[1:-1]
    return bool(supervised[:positions].any())


def split_holdout(groups: Sequence[str], count: int, seed: int) -> tuple[list[int], list[int]]:
    """Document numbers for training and for the hold-out: about `count` documents, never half of a group.

    `groups[d]` names what document d was made from: answers to one prompt must not be on both sides.
    """
    if count >= len(groups):
        raise PeagleError(
            f"holdout is {count} and there are {len(groups)} usable documents: hold out fewer, or prepare more data"
        )
    sizes = Counter(groups)
    names = sorted(sizes)
    held: set[str] = set()
    taken = 0
    for number in generator(seed, _HOLDOUT_KEY).permutation(len(names)):
        if taken >= count:
            break
        held.add(names[number])
        taken += sizes[names[number]]
    if len(held) == len(names):
        raise PeagleError(
            f"holdout is {count} and the data hold {len(names)} prompts, which would all go: hold out fewer documents"
        )
    training = [d for d, name in enumerate(groups) if name not in held]
    return training, [d for d, name in enumerate(groups) if name in held]


def epoch_packs(
    documents: Sequence[TokenDocument], layout: RowLayout, seed: int, epoch: int
) -> Iterator[tuple[Packed, NDArray[np.int64]]]:
    """Packs of one shuffled pass over the documents, each with the numbers of its documents."""
    order = generator(seed, _SHUFFLE_KEYS + epoch).permutation(len(documents))
    for packed in pack_documents((documents[d] for d in order), layout):
        yield packed, order[packed.source_D]


def batches(
    documents: Sequence[TokenDocument], layout: RowLayout, features: FeatureSource, seed: int, place: Place
) -> Iterator[Batch]:
    """Endless batches from `place` on. Raises PeagleError when no document fits the layout."""
    step, epoch, skip = place.step, place.epoch, place.index
    while True:
        packs = 0
        for index, (packed, document_D) in enumerate(epoch_packs(documents, layout, seed, epoch)):
            packs += 1
            if index < skip:
                continue
            rows = draw_rows(packed, layout, generator(seed, step))
            yield make_batch(packed, rows, features.index(packed, document_D), epoch=epoch, index=index)
            step += 1
        if packs == 0:  # the next epoch would have none either
            raise PeagleError(
                f"no document fits batch_positions {layout.positions} with a supervised position: raise it"
            )
        epoch, skip = epoch + 1, 0


def make_batch(packed: Packed, rows: Rows, features: FeatureIndex, *, epoch: int, index: int) -> Batch:
    """Bundle a pack, its rows and the place of its features."""
    return Batch(
        epoch=epoch,
        index=index,
        positions=int(np.count_nonzero(packed.doc_P >= 0)),
        input_ids_P=torch.from_numpy(packed.input_ids_P),
        labels_P=torch.from_numpy(packed.labels_P),
        features=features,
        rows=rows,
    )


class Prefetcher:
    """Iterates `source` in a background thread, a few batches ahead, in page-locked memory when that speeds up copies.

    `waited` counts the seconds the consumer spent waiting for data. An exception of the source reaches the consumer.
    """

    def __init__(self, source: Iterator[Batch], device: torch.device) -> None:
        self.waited = 0.0
        self._source, self._device = source, device
        self._ready: queue.Queue[Batch | BaseException] = queue.Queue(PREFETCHED)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="batches", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def next(self) -> Batch:
        """The next batch on the device; its copies may still be under way on the current stream."""
        start = time.perf_counter()
        item = self._ready.get()
        self.waited += time.perf_counter() - start
        if isinstance(item, BaseException):
            raise item
        return map_tensors(item, lambda tensor: tensor.to(self._device, non_blocking=True))

    def _work(self) -> None:
        try:
            for batch in self._source:
                pinned = map_tensors(batch, Tensor.pin_memory) if self._device.type == "cuda" else batch
                if not self._offer(pinned):
                    return
        except BaseException as error:  # whatever it is, it must not die unseen in this thread
            self._offer(error)

    def _offer(self, item: Batch | BaseException) -> bool:
        """Queue an item; False when the consumer has left."""
        while not self._stop.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False
