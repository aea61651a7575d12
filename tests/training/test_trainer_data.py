"""Documents to batches, features, held-out evaluation, and what is refused before training starts."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

from peagle.devices import resolve_device, resolve_dtype
from peagle.errors import PeagleError
from peagle.training import features as features_module
from peagle.training.attention import causal_document_attend
from peagle.training.batches import Batch, Place, Prefetcher, batches, generator, split_holdout
from peagle.training.corpus import split_corpus
from peagle.training.dataset import Document
from peagle.training.distributed import Ranks
from peagle.training.evaluate import count_rounds
from peagle.training.features import OnlineFeatures, fill_batches, fill_cache, padded_causal_attend
from peagle.training.setup import choose_mask_token, plan_rule, resolve_attention, row_layout
from tests.training.tiny_drafter import tiny_drafter
from tests.training.tiny_run import documents, recipe, tiny_target

CPU = torch.device("cpu")
RULE = plan_rule(recipe())


def test_padded_documents_run_as_if_alone():
    target = tiny_target().model
    lengths = (7, 4)
    ids = torch.randint(3, 60, (2, 7))
    positions = torch.arange(7).repeat(2)
    hidden, taps = target(ids.flatten(), positions, padded_causal_attend(2, 7), (1, 3))
    for row, length in enumerate(lengths):
        attend = causal_document_attend(torch.zeros(length, dtype=torch.int64), "reference")
        alone_hidden, alone_taps = target(ids[row, :length], torch.arange(length), attend, (1, 3))
        torch.testing.assert_close(hidden[row * 7 : row * 7 + length], alone_hidden, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(taps[row * 7 : row * 7 + length], alone_taps, atol=1e-5, rtol=1e-5)


def test_gathered_features_are_those_of_the_right_tokens():
    """Taps of token i and the hidden state of token i + 1, from both sources."""
    target, data = tiny_target().model, documents(6)
    layout = row_layout(recipe(), documents(4), tiny_drafter().config, CPU)
    ids = [document.input_ids[:-1] for document in data]
    cached = fill_cache(target, (1, 3), ids, Console(quiet=True))
    online = OnlineFeatures(target, (1, 3), "reference")
    one, two = (next(batches(data, layout, RULE, source, 0, Place())) for source in (online, cached))
    real = one.rows.doc_R[: layout.positions] >= 0
    for left, right in zip(online.gather(one.features), cached.gather(two.features), strict=True):
        torch.testing.assert_close(left[real], right[real], atol=1e-5, rtol=1e-5)
    order = generator(0, (1 << 62)).permutation(len(data))
    first = data[order[0]]
    attend = causal_document_attend(torch.zeros(len(first.input_ids), dtype=torch.int64), "reference")
    tokens = torch.from_numpy(first.input_ids).long()
    hidden, taps = target(tokens, torch.arange(len(tokens)), attend, (1, 3))
    count = len(tokens) - 2
    gathered_taps, gathered_hidden = cached.gather(two.features)
    torch.testing.assert_close(gathered_taps[:count], taps[:count], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gathered_hidden[:count], hidden[1 : count + 1], atol=1e-5, rtol=1e-5)


def test_fill_batches_hold_every_document_once():
    lengths = np.array([3, 30, 5, 5, 4, 9, 2])
    parts = fill_batches(lengths, 20)
    assert sorted(np.concatenate(parts).tolist()) == list(range(7))
    assert all(len(part) == 1 or len(part) * lengths[part].max() <= 20 for part in parts)
    assert all(lengths[part[0]] == lengths[part].max() for part in parts)


def test_too_large_cache_names_both_sizes_and_the_remedy(monkeypatch):
    monkeypatch.setattr(features_module, "free_bytes", lambda device: 1024)
    with pytest.raises(PeagleError, match=r"MiB.*MiB.*--no-cache-features"):
        fill_cache(tiny_target().model, (1,), [np.arange(9, dtype=np.int32)], Console(quiet=True))


def test_batches_continue_from_any_place():
    data, layout, source = (
        documents(12),
        row_layout(recipe(), documents(4), tiny_drafter().config, CPU),
        OnlineFeatures(tiny_target().model, (1,), "reference"),
    )
    stream = batches(data, layout, RULE, source, 3, Place())
    straight = [next(stream) for _ in range(9)]
    for number in (1, 4, 7):
        before = straight[number - 1]
        place = Place(pack=number, epoch=before.epoch, index=before.index + 1)
        resumed = next(batches(data, layout, RULE, source, 3, place))
        expected = straight[number]
        assert (resumed.epoch, resumed.index) == (expected.epoch, expected.index)
        assert torch.equal(resumed.input_ids_P, expected.input_ids_P)
        assert torch.equal(resumed.rows.anchor_R, expected.rows.anchor_R)
    assert straight[-1].epoch > 0, "the nine batches cross an epoch"


@pytest.mark.parametrize("world", [2, 5])
def test_ranks_share_the_packs_of_one_stream(world):
    data, layout = documents(12), row_layout(recipe(), documents(4), tiny_drafter().config, CPU)
    source = OnlineFeatures(tiny_target().model, (1,), "reference")
    stream = batches(data, layout, RULE, source, 3, Place())
    straight = [next(stream) for _ in range(4 * world)]
    last = straight[0]  # of rank 0 in its first step: a run of `world` ranks resumes from what follows that step
    for place, skipped in (
        (Place(), 0),
        (Place(pack=world, epoch=last.epoch, index=last.index + world), world),
    ):
        for rank in range(world):
            mine = batches(data, layout, RULE, source, 3, place, Ranks(rank=rank, world=world))
            for expected in straight[skipped + rank :: world]:
                batch = next(mine)
                assert (batch.epoch, batch.index) == (expected.epoch, expected.index)
                assert torch.equal(batch.input_ids_P, expected.input_ids_P)
                assert torch.equal(batch.rows.anchor_R, expected.rows.anchor_R)


def test_prefetcher_passes_errors_on_and_stops():
    def source():
        yield make()
        raise RuntimeError("broken shard")

    def make() -> Batch:
        data, layout = documents(4), row_layout(recipe(), documents(4), tiny_drafter().config, CPU)
        return next(batches(data, layout, RULE, OnlineFeatures(tiny_target().model, (1,), "reference"), 0, Place()))

    with Prefetcher(source(), CPU) as data:
        assert data.next().positions > 0
        with pytest.raises(RuntimeError, match="broken shard"):
            data.next()
    endless = iter(lambda: None, 1)
    with Prefetcher(endless, CPU):  # leaving must not hang on the full queue
        pass


def test_holdout_never_splits_a_prompt():
    groups = [f"p{number % 7}" for number in range(21)]
    training, held_out = split_holdout(groups, 5, seed=0)
    assert sorted(training + held_out) == list(range(21))
    assert len(held_out) == 6
    assert not {groups[d] for d in training} & {groups[d] for d in held_out}
    assert split_holdout(groups, 5, seed=0) == (training, held_out)
    assert split_holdout(groups, 0, seed=0) == (list(range(21)), [])


def test_bad_data_is_refused():
    with pytest.raises(PeagleError, match="none of 0 documents"):
        split_corpus([], recipe())
    silent = [Document("a", np.arange(9, dtype=np.int32), np.zeros(9, np.bool_))]
    with pytest.raises(PeagleError, match="none of 1 documents"):
        split_corpus(silent, recipe())
    with pytest.raises(PeagleError, match="holdout is 10"):
        split_corpus(documents(10), recipe(holdout=10))
    with pytest.raises(PeagleError, match="holdout is 3"):
        split_corpus(documents(10, prompts=1), recipe(holdout=3))


def test_bad_settings_are_refused():
    for call in (
        lambda: resolve_device("quantum"),
        lambda: resolve_dtype("int4", CPU),
        lambda: resolve_attention("flex", CPU),
    ):
        with pytest.raises(PeagleError):
            call()


def test_mask_token_choice():
    target, data = tiny_target(), documents(4)
    assert choose_mask_token(target, data, None) == 60, "the first row that the tokenizer does not use"
    assert choose_mask_token(target, data, 61) == 61
    used = int(data[0].input_ids[0])
    with pytest.raises(PeagleError, match="occurs in the data"):
        choose_mask_token(target, data, used)
    with pytest.raises(PeagleError, match="outside"):
        choose_mask_token(target, data, 64)


def test_mask_token_falls_back_to_a_special_token_without_a_role():
    class Tokenizer(SimpleNamespace):
        def __len__(self) -> int:
            return 64

    names = ("<eos>", "<start>", "<spare>")
    target = tiny_target()
    target.tokenizer = Tokenizer(
        bos_token_id=None, eos_token_id=0, pad_token_id=0, unk_token_id=None, chat_template="{{ '<start>' }}",
        added_tokens_decoder={n: SimpleNamespace(content=name, special=True) for n, name in enumerate(names)},
    )  # fmt: skip
    assert choose_mask_token(target, documents(4), None) == 2
    spare = Document("a", np.array([2, 5, 6], np.int32), np.ones(3, np.bool_))
    with pytest.raises(PeagleError, match="mask-token-id"):
        choose_mask_token(target, [spare], None)


def test_count_rounds_walks_spans():
    supervised = np.array([0, 1, 1, 1, 1, 0, 1, 1], bool)
    accepted = np.array([9, 2, 9, 9, 0, 9, 1, 9])
    # Rounds at 1 (three tokens), 4 (one), then 6 (two).
    packed = SimpleNamespace(supervised_P=supervised, doc_P=np.zeros(8, np.int64))
    assert count_rounds(packed, accepted) == (3, 6)


def test_count_rounds_starts_anew_in_every_document():
    """A round that ends a document emits one token beyond it, which is no position of the next one."""
    packed = SimpleNamespace(supervised_P=np.ones(6, bool), doc_P=np.array([0, 0, 0, 1, 1, 1]))
    # Rounds at 0 (two tokens) and 2 (two, the second after the end), at 3 (one) and 4 (three).
    assert count_rounds(packed, np.array([1, 9, 1, 0, 2, 9])) == (4, 8)
