"""Recipe files: the same settings in three languages, flags that win, and one line on every mistake."""

import json
from dataclasses import asdict, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import get_args, get_type_hints

import pytest

from peagle import cli
from peagle.config import TrainConfig
from peagle.errors import PeagleError
from peagle.exits import run
from peagle.recipe_file import _describe, read_recipe

ROOT = Path(__file__).resolve().parents[1]
ARGUMENTS = ("model", "data", "out")
TOML = 'model = "m"\nnum_layers = 2\ntap_ids = [1, 2]\nmuon_lr = 1e-3\ncompile = true\nmax_seconds = 5\n'
# 1e-3 is text in YAML 1.1.
YAML = "model: m\nnum_layers: 2\ntap_ids: [1, 2]\nmuon_lr: 1e-3\ncompile: true\nmax_seconds: 5\n"
JSON = json.dumps(
    {"model": "m", "num_layers": 2, "tap_ids": [1, 2], "muon_lr": 1e-3, "compile": True, "max_seconds": 5}
)


def read(tmp_path, text, suffix=".yaml"):
    file = tmp_path / f"recipe{suffix}"
    file.write_text(text)
    return read_recipe(file, TrainConfig, ARGUMENTS)


@pytest.mark.parametrize(("suffix", "text"), [(".toml", TOML), (".yaml", YAML), (".yml", YAML), (".json", JSON)])
def test_three_languages_say_the_same(tmp_path, suffix, text):
    assert read(tmp_path, text, suffix) == {
        "model": "m", "num_layers": 2, "tap_ids": "1,2", "muon_lr": 1e-3, "compile": True, "max_seconds": 5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("num_layer: 3", "unknown key 'num_layer': the nearest known one is 'num_layers'"),
        ("zzz: 3", "unknown key 'zzz': the nearest known one is"),
        ("1: 3", "unknown key 1: the nearest"),
        ("num_layers: four", "num_layers is 'four': expected an integer"),
        ("num_layers: true", "num_layers is True: expected an integer"),
        ("num_layers: 4.0", "num_layers is 4.0: expected an integer"),
        ("num_layers: null", "num_layers is None: expected an integer"),
        ("muon_lr: [1]", r"muon_lr is \[1\]: expected a number"),
        ("compile: 1", "compile is 1: expected true or false"),
        ("loss: 1", "loss is 1: expected text"),
        ("model: 1", "model is 1: expected text"),
        ("tap_ids: [1, a]", "expected a list, each an integer or nothing"),
        ("tap_ids: 1", "expected a list"),
        ("seed: 1\nseed: 2", "'seed' stands in it twice"),
        ("- seed", "holds list, expected lines of the form"),
        ("seed: [", "cannot be understood"),
        ("[seed]: 1", "cannot be understood"),
        ("", "holds NoneType"),
    ],
)
def test_mistakes_are_named(tmp_path, text, says):
    with pytest.raises(PeagleError, match=f"recipe.yaml.*{says}") as raised:
        read(tmp_path, text)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("suffix", "text"), [(".toml", "seed = 1"), (".yaml", "seed: 1"), (".json", '{"seed": 1}')])
def test_a_byte_order_mark_is_skipped(tmp_path, suffix, text):
    assert read(tmp_path, "\ufeff" + text, suffix) == {"seed": 1}


def test_unreadable_files(tmp_path):
    with pytest.raises(PeagleError, match="cannot read recipe"):
        read_recipe(tmp_path / "missing.toml", TrainConfig)
    with pytest.raises(PeagleError, match=r"ends in '\.ini': expected one of \.toml, \.yaml"):
        read(tmp_path, "", ".ini")
    with pytest.raises(PeagleError, match="cannot be understood"):
        read(tmp_path, "seed = ", ".toml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PeagleError, match="cannot be understood"):
        read_recipe(tmp_path / "bytes.yaml", TrainConfig)


def test_a_recipe_that_a_run_wrote_is_a_recipe(tmp_path):
    config = TrainConfig(num_layers=2, tap_ids=(1, 2), max_seconds=5.0)
    text = json.dumps({"base_model": "m", "data_hash": "0", **asdict(config)})
    settings = read(tmp_path, text, ".json")
    settings["tap_ids"] = tuple(map(int, settings["tap_ids"].split(",")))
    assert TrainConfig(**{k: v for k, v in settings.items() if v != ""}) == config


def test_every_field_can_be_described_and_null_means_the_default():
    hints = get_type_hints(TrainConfig)
    for field in fields(TrainConfig):
        assert _describe(hints[field.name])
        optional = isinstance(hints[field.name], UnionType) and NoneType in get_args(hints[field.name])
        assert not optional or field.default is None, f"{field.name}: a null in a recipe could not be told from silence"


@pytest.fixture
def trained(monkeypatch):
    """Arguments that `peagle train` passes on, instead of training."""
    calls = []
    module = pytest.importorskip("peagle.training.trainer")
    monkeypatch.setattr(module, "train", lambda *arguments: calls.append(arguments[:4]))
    return calls


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path, trained):
    file = tmp_path / "r.toml"
    file.write_text(TOML + 'data = "d"\nout = "o"\n')
    assert run(cli.app, ["train", "--recipe", str(file)]) == 0
    assert run(cli.app, ["train", "n", "--num-layers", "3", "--no-compile", "--out", "p", "--recipe", str(file)]) == 0
    one = TrainConfig(num_layers=2, tap_ids=(1, 2), muon_lr=1e-3, compile=True, max_seconds=5.0)
    two = TrainConfig(num_layers=3, tap_ids=(1, 2), muon_lr=1e-3, max_seconds=5.0)
    assert trained == [("m", Path("d"), Path("o"), one), ("n", Path("d"), Path("p"), two)]


def test_lists_of_names(tmp_path, trained):
    file = tmp_path / "r.yaml"
    file.write_text("model: m\ndata: d\nout: o\nlogger: [tensorboard, wandb]\n")
    for flags in ((), ("--logger", "trackio"), ("--logger", "wandb, trackio")):
        assert run(cli.app, ["train", "--recipe", str(file), *flags]) == 0
    assert [call[3].logger for call in trained] == [("tensorboard", "wandb"), ("trackio",), ("wandb", "trackio")]
    file.write_text("model: m\ndata: d\nout: o\nlogger: []\n")
    assert run(cli.app, ["train", "--recipe", str(file)]) == 0
    assert trained[-1][3].logger == ()


def test_values_of_a_file_are_checked_like_flags(tmp_path, capsys):
    file = tmp_path / "r.yaml"
    file.write_text("model: m\ndata: d\nout: o\nnum_layers: 0\n")
    assert run(cli.app, ["train", "--recipe", str(file)]) == 2
    assert "num_layers is 0" in capsys.readouterr().err
    file.write_text("model: m\ndata: d\n")
    assert run(cli.app, ["train", "--recipe", str(file)]) == 2
    assert "--out" in capsys.readouterr().err


@pytest.mark.parametrize("file", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda file: file.name)
def test_shipped_recipes_are_valid(file, trained):
    assert run(cli.app, ["train", "--recipe", str(file), "--data", "d", "--out", "o"]) == 0
    assert trained[0][0], "a shipped recipe names its target"
