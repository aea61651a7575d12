"""From documents to training steps: hold-out split, shuffled epochs, packing, COD draws, and a thread that runs ahead.

Everything is a function of (seed, epoch, pack): a resumed run sees the same batches as one that never stopped.
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
from peagle.training.distributed import SINGLE, Ranks
from peagle.training.features import FeatureIndex, FeatureSource
from peagle.training.plan import Partition, Plan, PlanRule, plan_pack
from peagle.training.rows import Packed, RowLayout, Rows, TokenDocument, draw_rows, pack_documents

PREFETCHED = 4
# The second word of a Philox key. COD draws use the pack's number in the run, which stays below these.
_SHUFFLE_KEYS = 1 << 62
_HOLDOUT_KEY = 1 << 63
_WORD = (1 << 64) - 1

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One pack, ready to run; shapes are static except those of `plan`."""

    epoch: int
    index: int  # pack number within the epoch
    positions: int  # packed positions that are not padding
    partition: Partition
    input_ids_P: Tensor
    labels_P: Tensor
    features: FeatureIndex
    rows: Rows
    plan: Plan
    totals: Tensor  # float32 [3]: the plan's weight, positions, charged rows
    seen_R: NDArray[np.int64]  # on the host: keys that each real row sees, sliding windows aside, positions first


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A place in the data order: the next pack is number `index` of `epoch` and number `pack` of the run (0-based).

    An index past the end of the epoch counts on in the next one.
    """

    pack: int = 0
    epoch: int = 0
    index: int = 0


def generator(seed: int, word: int) -> np.random.Generator:
    """Counter-based generator number `word` of a seed."""
    return np.random.Generator(np.random.Philox(key=np.array([seed & _WORD, word & _WORD], np.uint64)))


def map_tensors(value: T, change: Callable[[Tensor], Tensor]) -> T:
    """A copy of a dataclass with `change` applied to every tensor inside it."""
    if isinstance(value, Tensor):
        return change(value)  # type: ignore[return-value]  # a Tensor in, a Tensor out
    if isinstance(value, tuple):
        return tuple(map_tensors(part, change) for part in value)  # type: ignore[return-value]  # likewise
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
    documents: Sequence[TokenDocument],
    layout: RowLayout,
    rule: PlanRule,
    features: FeatureSource,
    seed: int,
    place: Place,
    ranks: Ranks = SINGLE,
) -> Iterator[Batch]:
    """Endless batches from `place` on, of which each rank gets its share in turn.

    Every rank packs the whole data and draws rows for its own packs only; the draws belong to the pack's number in the
    run, so they do not depend on who makes them. Raises PeagleError when no document fits the layout.
    """
    pack, epoch, skip = place.pack, place.epoch, place.index
    while True:
        packs = 0
        for index, (packed, document_D) in enumerate(epoch_packs(documents, layout, seed, epoch)):
            packs += 1
            if index < skip:
                continue
            if (pack - place.pack) % ranks.world == ranks.rank:
                rows = draw_rows(packed, layout, generator(seed, pack))
                plan = plan_pack(rows, layout, rule)
                yield make_batch(packed, rows, plan, rule, features.index(packed, document_D), epoch=epoch, index=index)
            pack += 1
        if packs == 0:  # the next epoch would have none either
            raise PeagleError(
                f"no document fits batch_positions {layout.positions} with a supervised position: raise it"
            )
        epoch, skip = epoch + 1, max(0, skip - packs)


def make_batch(
    packed: Packed, rows: Rows, plan: Plan, rule: PlanRule, features: FeatureIndex, *, epoch: int, index: int
) -> Batch:
    """Bundle a pack, its rows and their plan, and the place of its features."""
    positions = int(np.count_nonzero(packed.doc_P >= 0))
    return Batch(
        epoch=epoch,
        index=index,
        positions=positions,
        partition=rule.partition,
        input_ids_P=torch.from_numpy(packed.input_ids_P),
        labels_P=torch.from_numpy(packed.labels_P),
        features=features,
        rows=rows,
        plan=plan,
        totals=torch.tensor([plan.weight, positions, plan.charged_rows]),
        seen_R=rows.position_R.numpy()[rows.doc_R.numpy() >= 0] + 1,
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
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # holds per thread; page-locking would open the first GPU as well
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
