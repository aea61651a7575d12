"""`peagle extract`: the store holds the target's features, survives interruptions, and feeds training bit by bit."""

import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import load_file

from peagle.config import ExtractConfig
from peagle.errors import PeagleError
from peagle.training import corpus as corpus_module
from peagle.training import extract as extract_module
from peagle.training.corpus import split_corpus
from peagle.training.dataset import Document, data_hash
from peagle.training.extract import extract
from peagle.training.feature_store import (
    open_features,
    plan_shards,
    read_store_manifest,
    stored_tokens,
)
from peagle.training.features import CachedFeatures, fill_cache
from peagle.training.hf_target import TargetSizes
from peagle.training.rows import RowLayout, pack_documents
from tests.training.tiny_run import documents, recipe, tiny_target

TAPS = (1, 2, 3)
TOKEN_BYTES = 4 * 32 * 4  # four vectors of 32 float32 values
MANIFEST = {"complete": True, "settings": {"model": "tiny"}}
LAYOUT = RowLayout(positions=64, mask_rows=256, num_depths=4)


@pytest.fixture
def data():
    """Documents of which one has no supervised position."""
    made = documents(9)
    made.insert(4, Document("silent", np.arange(3, 20, dtype=np.int32), np.zeros(17, np.bool_)))
    return made


@pytest.fixture
def world(tmp_path, monkeypatch, data):
    """A model and a data set that need no files; `run` extracts with shards of about 60 tokens."""
    target = tiny_target()
    target.path = tmp_path
    (tmp_path / "model.safetensors").write_text("weights")
    monkeypatch.setattr(corpus_module, "load_documents", lambda folder: (data, MANIFEST))
    for module in (corpus_module, extract_module):
        monkeypatch.setattr(module, "resolve_model", lambda model: tmp_path)
    monkeypatch.setattr(extract_module, "load_training_target", lambda *args, **kwargs: target)
    monkeypatch.setattr(extract_module, "target_sizes", lambda path: TargetSizes(32, 4, 64, 128))
    console = Console(record=True, width=250)

    def run(out="store", **changes):
        settings = {"tap_ids": TAPS, "dtype": "float32", "device": "cpu", "shard_gib": 60 * TOKEN_BYTES / 2**30}
        yes = changes.pop("yes", False)
        config = ExtractConfig(**{**settings, **changes})
        return extract("tiny", tmp_path / "data", tmp_path / out, config, console, yes=yes)

    return SimpleNamespace(run=run, target=target, console=console, out=tmp_path / "store", data=data)


def opened(world, number_D=None):
    numbers = np.arange(len(world.data)) if number_D is None else number_D
    return open_features(world.out, world.target, data_hash(MANIFEST), TAPS, numbers)


def test_a_store_holds_what_the_cache_holds(world):
    result = world.run()
    assert result.shards > 2
    assert result.tokens == sum(len(d.input_ids) - 1 for d in world.data if d.id != "silent")
    assert len({path.stat().st_mode for path in world.out.iterdir()}) == 1, "as readable as any other file"
    text = world.console.export_text()
    size = f"{result.tokens} tokens x (3 taps + 1) x 32 values x 4 bytes = 0.1 MiB in {result.shards} shards"
    assert size in text.replace(",", "")
    assert text.index("4 bytes") < text.index("shard 1 of")
    source = opened(world)
    spoken = [d for d in world.data if d.id != "silent"]
    cached = fill_cache(world.target.model, TAPS, [d.input_ids[:-1] for d in spoken], Console(quiet=True))
    for packed in pack_documents(spoken, LAYOUT):
        numbers = packed.source_D + (packed.source_D >= 4)
        stored = source.gather(source.index(packed, numbers))
        real = packed.doc_P >= 0
        for left, right in zip(stored, cached.gather(cached.index(packed, packed.source_D)), strict=True):
            torch.testing.assert_close(left[real], right[real], atol=1e-5, rtol=1e-5)
            assert not left[~real].any()


def test_gathering_is_bit_equal_to_a_cache_of_the_same_values(world):
    """Held-out documents included, in the order of a corpus and not of the data set."""
    world.run()
    corpus = split_corpus(world.data, recipe(holdout=3))
    source = opened(world, corpus.number_D)
    whole = opened(world)
    tokens_D = stored_tokens(world.data)
    shards = [load_file(shard.path) for shard in whole._shards]
    values = torch.cat([torch.cat((shard["taps"], shard["hidden"]), dim=1) for shard in shards])
    cached = CachedFeatures(values, 96, (np.cumsum(tokens_D) - tokens_D)[corpus.number_D])
    for first, part in ((0, corpus.train), (corpus.training, corpus.held_out)):
        packs = list(pack_documents(part, LAYOUT))
        assert packs
        for packed in packs:
            numbers = packed.source_D + first
            real = packed.doc_P >= 0
            left, right = (s.gather(s.index(packed, numbers)) for s in (source, cached))
            assert all(torch.equal(a[real], b[real]) for a, b in zip(left, right, strict=True))


def test_bfloat16_is_kept_to_the_bit(world):
    world.target.model.to(torch.bfloat16)
    world.run(dtype="bfloat16")
    source = opened(world)
    packed = next(pack_documents(world.data[:3], LAYOUT))
    taps, hidden = source.gather(source.index(packed, packed.source_D))
    assert taps.dtype == hidden.dtype == torch.bfloat16
    cached = fill_cache(world.target.model, TAPS, [d.input_ids[:-1] for d in world.data[:3]], Console(quiet=True))
    expected = cached.gather(cached.index(packed, packed.source_D))[0]
    real = packed.doc_P >= 0
    torch.testing.assert_close(taps[real].float(), expected[real].float(), atol=0.1, rtol=0.05)


def test_interruption_keeps_finished_shards_and_the_rest_is_the_same(world, monkeypatch):
    whole = world.run("whole")
    original, calls = extract_module._shard_features, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(extract_module, "_shard_features", interrupted)
    with pytest.raises(KeyboardInterrupt):
        world.run()
    assert "Stopped: 2 of" in world.console.export_text(clear=False)
    assert not read_store_manifest(world.out).complete
    with pytest.raises(PeagleError, match=r"2 of \d shards: run the same `peagle extract` again"):
        opened(world)
    (world.out / ".features-00007.safetensors.01234567.tmp").write_text("half")
    result = world.run()
    assert (result.kept_shards, result.shards) == (2, whole.shards)
    for shard in read_store_manifest(world.out).shards:
        assert (world.out / shard.file).read_bytes() == (whole.out / shard.file).read_bytes()
    assert not list(world.out.glob(".*.tmp"))
    monkeypatch.setattr(extract_module, "load_training_target", None)  # nothing is loaded
    assert world.run().kept_shards == whole.shards


def test_a_damaged_or_missing_shard_is_named_and_made_again(world):
    world.run()
    first, second = (world.out / f"features-0000{n}.safetensors" for n in (0, 1))
    whole = first.read_bytes(), second.read_bytes()
    first.write_bytes(whole[0][:-8])
    with pytest.raises(PeagleError, match=r"features-00000.* missing or damaged .*manifest says.*again"):
        opened(world)
    first.write_bytes(whole[0])
    second.unlink()
    with pytest.raises(PeagleError, match=r"features-00001.* missing or damaged"):
        opened(world)
    world.run()
    assert second.read_bytes() == whole[1]
    source = opened(world)
    first.write_bytes(whole[0][:500])
    with pytest.raises(PeagleError, match=r"features-00000.* missing or damaged \(it ends early\)"):
        source.index(next(pack_documents(world.data[:1], LAYOUT)), np.array([0]))
    first.write_bytes(b"\xff" * len(whole[0]))
    with pytest.raises(PeagleError, match=r"features-00000.* missing or damaged"):
        opened(world)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({}, "target_weights_fingerprint"),
        ({"tap_ids": (1, 3)}, "tap_ids"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"shard_gib": 1.0}, "shard_bytes"),
    ],
)
def test_a_folder_belongs_to_its_settings(world, changes, what):
    world.run()
    if not changes:
        (world.target.path / "model.safetensors").write_text("others")
    with pytest.raises(PeagleError, match=f"holds features with {what} .* choose another --out"):
        world.run(**changes)


def test_training_checks_what_the_store_was_made_for(world):
    world.run()
    arguments = (world.out, world.target, data_hash(MANIFEST), TAPS, np.arange(10))
    for place, value, message in (
        (2, "other", "data_hash .* extract them again with the same data"),
        (3, (1, 2), r"tap_ids \[1, 2, 3\], this run has \[1, 2\]"),
        (0, world.out.parent, "has no features.json: give a folder that `peagle extract"),
    ):
        changed = list(arguments)
        changed[place] = value
        with pytest.raises(PeagleError, match=message):
            open_features(*changed)
    world.target.model.bfloat16()
    with pytest.raises(
        PeagleError, match="dtype 'float32', this run has 'bfloat16': extract, or train, with the other"
    ):
        open_features(*arguments)
    world.target.model.float()
    (world.target.path / "model.safetensors").write_text("others")
    with pytest.raises(PeagleError, match="holds features of tiny, whose weights are not those of tiny"):
        open_features(*arguments)


def disk(monkeypatch, free):
    monkeypatch.setattr(extract_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))


def test_the_disk_is_asked_first(world, monkeypatch):
    need = TOKEN_BYTES * int(stored_tokens(world.data).sum())
    disk(monkeypatch, need - 1)
    with pytest.raises(PeagleError, match=r"features need .* free: free .* choose another --out"):
        world.run(yes=True)
    disk(monkeypatch, int(need / 0.85))
    with pytest.raises(PeagleError, match=r"more than 80% of the .* pass --yes .* or free .* MiB"):
        world.run()
    assert not world.out.exists()
    assert world.run(yes=True).shards
    shutil.rmtree(world.out)
    disk(monkeypatch, int(need / 0.79))
    assert world.run().shards


@pytest.mark.parametrize(("answer", "goes_on"), [("y", True), (" YES ", True), ("", False), ("n", False)])
def test_a_terminal_is_asked(world, monkeypatch, answer, goes_on):
    disk(monkeypatch, int(TOKEN_BYTES * int(stored_tokens(world.data).sum()) / 0.85))
    world.console._force_terminal = True
    monkeypatch.setattr(extract_module.sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(world.console, "input", lambda question, markup: answer)
    if goes_on:
        assert world.run().shards
        return
    with pytest.raises(PeagleError, match="nothing was written"):
        world.run()
    assert not world.out.exists()


def test_a_full_disk_loses_nothing_finished(world, monkeypatch):
    original = safetensors.torch.save_file

    def full(tensors, path, metadata=None):
        if "00002" in path.name:
            path.write_bytes(b"half")
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        original(tensors, path, metadata)

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", full)
        with pytest.raises(PeagleError, match=r"no space left on the disk .* run the same command again"):
            world.run()
    assert not list(world.out.glob(".features*"))
    assert world.run().kept_shards == 2


def test_two_writers_are_kept_apart(world):
    world.out.mkdir()
    code = (
        "import sys; from pathlib import Path; from peagle.files import lock_output; "
        "lock_output(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    arguments = [sys.executable, "-c", code, str(world.out)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(PeagleError, match="another run is writing to"):
            world.run()
        other.kill()


def test_data_that_do_not_fit_are_refused_before_the_target_loads(world, monkeypatch):
    monkeypatch.setattr(extract_module, "load_training_target", None)
    for taps in ((1, 1), (3, 1), (1, 5)):
        with pytest.raises(PeagleError, match="tap ids"):
            world.run(tap_ids=taps)
    monkeypatch.setattr(extract_module, "target_sizes", lambda path: TargetSizes(32, 4, 40, 128))
    with pytest.raises(PeagleError, match="the data hold token id 59, the target has 40 tokens"):
        world.run()
    world.data[0].input_ids[1] = -5
    with pytest.raises(PeagleError, match="the data hold token id -5, the target has 40 tokens, numbered from 0"):
        world.run()
    monkeypatch.setattr(extract_module, "target_sizes", lambda path: TargetSizes(32, 4, 64, 8))
    with pytest.raises(PeagleError, match="all 10 documents are longer than the target's context of 8 tokens"):
        world.run()
    silent = [world.data[4]]
    monkeypatch.setattr(corpus_module, "load_documents", lambda folder: (silent, MANIFEST))
    monkeypatch.setattr(extract_module, "target_sizes", lambda path: TargetSizes(32, 4, 64, 128))
    with pytest.raises(PeagleError, match="none of 1 documents has a supervised token"):
        world.run()


def test_a_manifest_that_is_none_is_named(tmp_path):
    for text in ("{", "[]", '{"format": 2}', json.dumps({"format": 1, "complete": True, "shards": [{"index": 0}]})):
        (tmp_path / "features.json").write_text(text)
        with pytest.raises(PeagleError, match=r"not a manifest of format 1 .* extract the features again"):
            read_store_manifest(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest.update(settings=[]),
        lambda manifest: manifest.update(num_shards="2"),
        lambda manifest: manifest["shards"][0].update(file=3),
        lambda manifest: manifest["shards"][0].update(tokens="abc"),
        lambda manifest: manifest["shards"][0].update(index=1),
        lambda manifest: manifest["shards"][0].update(first_document=1),
        lambda manifest: manifest["shards"].append(manifest["shards"][0]),
    ],
)
def test_a_manifest_that_was_tampered_with_is_named(world, change):
    world.run()
    path = world.out / "features.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(PeagleError, match=r"not a manifest of format 1 .* extract the features again"):
        opened(world)


def test_shards_hold_whole_documents():
    tokens = np.array([3, 0, 4, 9, 0, 1, 1])
    assert plan_shards(tokens, 10, 75) == [(0, 3), (3, 5), (5, 7)]
    assert plan_shards(tokens, 10, 1) == [(0, 2), (2, 3), (3, 5), (5, 6), (6, 7)]
    assert plan_shards(tokens, 10, 10**6) == [(0, 7)]
    assert plan_shards(np.zeros(3, np.int64), 10, 75) == []


def test_an_index_of_another_source_is_refused(world):
    world.run()
    source = opened(world)
    packed = next(pack_documents(world.data[:2], LAYOUT))
    cache = fill_cache(world.target.model, TAPS, [d.input_ids[:-1] for d in world.data[:2]], Console(quiet=True))
    with pytest.raises(TypeError):
        source.gather(cache.index(packed, packed.source_D))
    with pytest.raises(TypeError):
        cache.gather(source.index(packed, packed.source_D))
