"""Which packs the latest steps were made of, to name them when a step turns out to have gone wrong."""

from collections.abc import Sequence
from itertools import islice

from peagle.config import TrainConfig
from peagle.errors import PeagleError
from peagle.training.batches import Batch, epoch_packs
from peagle.training.dataset import Document
from peagle.training.rows import RowLayout

_NAMED = 8  # documents named of each pack


class Trail:
    """The packs of every step since the last report: the device says only then which step was bad."""

    def __init__(self, documents: Sequence[Document], layout: RowLayout, config: TrainConfig) -> None:
        """What the packs are made of."""
        self._documents, self._layout, self._config = documents, layout, config
        self._packs: dict[int, list[tuple[int, int]]] = {}

    def add(self, step: int, batch: Batch) -> None:
        """Remember that the 1-based `step` trains on `batch`."""
        self._packs.setdefault(step, []).append((batch.epoch, batch.index))

    def forget(self) -> None:
        """All steps so far were good."""
        self._packs.clear()

    def check(self, bad_step: int) -> None:
        """Raise PeagleError if there is a bad step, -1 for none, naming what it was trained on."""
        if bad_step < 0:
            return
        packs = "; ".join(self._describe(*pack) for pack in self._packs.get(bad_step, []))
        config = self._config
        raise PeagleError(
            f"the loss or its gradient became NaN or infinite at step {bad_step} ({packs or 'unknown packs'}); "
            f"nothing of it was saved: lower muon_lr ({config.muon_lr}) or adamw_lr ({config.adamw_lr}), "
            "or leave those documents out, and start in another output directory"
        )

    def _describe(self, epoch: int, index: int) -> str:
        """A pack and the ids of its documents, by packing the epoch once more."""
        packs = epoch_packs(self._documents, self._layout, self._config.seed, epoch)
        _, document_D = next(islice(packs, index, None))
        ids = [self._documents[d].id for d in document_D]
        more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
        return f"epoch {epoch}, pack {index} with documents {', '.join(map(repr, ids[:_NAMED]))}{more}"
