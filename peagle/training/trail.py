"""Which packs the latest steps were made of, to name them when a step turns out to have gone wrong."""

from collections.abc import Sequence
from itertools import islice

from peagle.training.batches import Batch, epoch_packs
from peagle.training.dataset import Document
from peagle.training.rows import RowLayout

_NAMED = 8  # documents named of each pack


class Trail:
    """The packs of every step since the last report: the device says only then which step was bad."""

    def __init__(self) -> None:
        self._packs: dict[int, list[tuple[int, int]]] = {}

    def add(self, step: int, batch: Batch) -> None:
        """Remember that the 1-based `step` trains on `batch`."""
        self._packs.setdefault(step, []).append((batch.epoch, batch.index))

    def forget(self) -> None:
        """All steps so far were good."""
        self._packs.clear()

    def describe(self, step: int, documents: Sequence[Document], layout: RowLayout, seed: int) -> str:
        """The packs of `step` and the ids of their documents, by packing the epoch once more; "" if unknown."""
        return "; ".join(_describe(pack, documents, layout, seed) for pack in self._packs.get(step, []))


def _describe(pack: tuple[int, int], documents: Sequence[Document], layout: RowLayout, seed: int) -> str:
    epoch, index = pack
    for _, document_D in islice(epoch_packs(documents, layout, seed, epoch), index, index + 1):
        ids = [documents[d].id for d in document_D]
        more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
        return f"epoch {epoch}, pack {index} with documents {', '.join(map(repr, ids[:_NAMED]))}{more}"
    return f"epoch {epoch}, pack {index}"
