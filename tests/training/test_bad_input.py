"""What is wrong with data and settings is said before the first step."""

import hashlib
from types import SimpleNamespace

import numpy as np
import pytest

from peagle.config import TrainConfig
from peagle.errors import PeagleError
from peagle.training import corpus as corpus_module
from peagle.training.corpus import check_prepared_for, cut_report, cut_to_context, split_corpus
from peagle.training.dataset import Document
from peagle.training.rows import RowLayout, pack_documents
from peagle.training.setup import choose_mask_token, choose_tap_ids, unused_settings
from tests.training.tiny_run import documents, recipe, tiny_target


def test_data_of_another_template_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "load_tokenizer", lambda path: SimpleNamespace(chat_template="now"))
    settings = {"model": "one", "chat_template_sha256": hashlib.sha256(b"now").hexdigest()}
    check_prepared_for("one", tmp_path, tmp_path / "data", settings)
    settings["chat_template_sha256"] = hashlib.sha256(b"then").hexdigest()
    with pytest.raises(PeagleError, match=r"whose chat template differs from that of one: .* prepare"):
        check_prepared_for("one", tmp_path, tmp_path / "data", settings)


def test_documents_longer_than_the_context_are_cut_and_counted():
    data = documents(4)
    lengths = sorted(len(document.input_ids) for document in data)
    kept, note = cut_to_context(data, lengths[-1])
    assert all(left is right for left, right in zip(kept, data, strict=True))
    assert note == ""
    kept, note = cut_to_context(data, lengths[1])
    assert note == f"2 of 4 documents are longer than the target's {lengths[1]} tokens: cut to that"
    assert [len(d.loss_mask) for d in kept] == [len(d.input_ids) for d in kept]
    assert [d.id for d in kept] == [d.id for d in data]
    for left, right in zip(kept, data, strict=True):
        assert np.array_equal(left.input_ids, right.input_ids[: lengths[1]])
    with pytest.raises(PeagleError, match="all 4 documents are longer than the target's context of 5 tokens"):
        cut_to_context(data, 5)


def test_all_zero_masks_are_refused():
    silent = [Document("a", np.arange(9, dtype=np.int32), np.zeros(9, np.bool_))] * 3
    with pytest.raises(PeagleError, match="none of 3 documents has a supervised token"):
        split_corpus(silent, recipe())


def test_documents_cut_to_a_pack_are_counted():
    layout = RowLayout(positions=16, mask_rows=48, num_depths=4)
    data = documents(12)
    lost = [max(0, len(document.input_ids) - 2 - 16) for document in data]
    count, tokens = sum(n > 0 for n in lost), sum(lost)
    assert count
    assert cut_report(data, layout) == f"{count} documents cut to what fits a step, {tokens} of their tokens left out"
    packed_positions = sum(int((packed.doc_P >= 0).sum()) for packed in pack_documents(data, layout))
    assert packed_positions == sum(len(document.input_ids) - 2 for document in data) - tokens
    assert cut_report(data, RowLayout(positions=64, mask_rows=192, num_depths=4)) == ""


def test_a_corpus_knows_its_documents_numbers():
    data = documents(9)
    data.insert(2, Document("silent", np.arange(9, dtype=np.int32), np.zeros(9, np.bool_)))
    corpus = split_corpus(data, recipe(holdout=3))
    assert all(data[n] is document for n, document in zip(corpus.number_D, corpus.documents, strict=True))
    assert sorted(corpus.number_D) == [0, 1, *range(3, 10)]
    assert corpus.left_out == 1


@pytest.mark.parametrize(
    ("taps", "layers", "message"),
    [
        ((1, 9), 8, r"\[1, 9\] do not all exist: give ids from 0 to 8"),
        ((-1, 2), 8, "do not all exist"),
        ((), 8, "do not all exist"),
        ((2, 2, 5), 8, r"\[2, 2, 5\] do not ascend: give each once"),
        ((5, 2), 8, "do not ascend"),
        (None, 4, r"\[2, 2, 1\], the default for 4 layers, do not ascend"),
        (None, 2, r"\[2, 1, -1\], the default for 2 layers, do not all exist"),
    ],
)
def test_taps_must_exist_and_ascend(taps, layers, message):
    with pytest.raises(PeagleError, match=message):
        choose_tap_ids(taps, layers)


def test_taps_that_will_do():
    assert choose_tap_ids(None, 24) == (2, 12, 21)
    assert choose_tap_ids((0, 8), 8) == (0, 8)


@pytest.mark.parametrize("role", ["pad", "bos", "eos", "unk"])
def test_a_mask_token_with_a_role_is_refused(role):
    target = tiny_target()
    setattr(target.tokenizer, f"{role}_token_id", 62)
    with pytest.raises(PeagleError, match=f"mask token id 62 is the {role} token: choose an id without a role"):
        choose_mask_token(target, documents(4), 62)


def test_an_end_token_of_the_model_is_no_mask_token():
    target = tiny_target()
    target.tokenizer.eos_token_id = None
    with pytest.raises(PeagleError, match="mask token id 2 is the eos token"):
        choose_mask_token(target, documents(4), 2)


def test_depths_and_keep_ratio_have_ranges():
    for depths in (0, -1):
        with pytest.raises(PeagleError, match=f"num_depths is {depths}: it must be a whole number of at least 1"):
            TrainConfig(num_depths=depths)
    with pytest.raises(PeagleError, match="num_depths is 65: more than the 64 positions of a step, lower it"):
        recipe(num_depths=65)
    for ratio in (0.0, 1.01, -0.5):
        with pytest.raises(PeagleError, match=rf"keep_ratio is {ratio}: it must be in \(0, 1\]"):
            TrainConfig(keep_ratio=ratio)
    with pytest.raises(PeagleError, match="features and cache_features exclude each other"):
        TrainConfig(features="folder", cache_features=True)


def test_settings_without_effect_are_named():
    assert unused_settings(recipe()) == ""
    assert unused_settings(recipe(partition="algorithm1", segments=2, keep_ratio=0.5)) == ""
    assert unused_settings(recipe(segments=2, optimizer="adamw", muon_lr=1.0)).endswith(": segments, muon_lr")
    unrolled = recipe(method="eagle3", mask_token_id=None, keep_ratio=0.5, partition="flat", chunk_rows=9)
    assert unused_settings(unrolled) == "without effect on this run: keep_ratio, partition, chunk_rows"
