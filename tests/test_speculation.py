"""Which head the flags choose."""

import pytest

from peagle import speculation
from peagle.config import SpeculativeConfig
from peagle.errors import PeagleError
from peagle.speculation import DEFAULT_NUM_SPECULATIVE_TOKENS, SpeculationFlags, choose_speculation, shipped_head


def choose(model, **flags):
    return choose_speculation(model, SpeculationFlags(**flags))


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A checkout that ships a head."""
    head = tmp_path / "heads" / "smollm2-135m-instruct-p-eagle"
    head.mkdir(parents=True)
    (head / "config.json").write_text("{}")
    monkeypatch.setattr(speculation.peagle, "__file__", str(tmp_path / "peagle" / "__init__.py"))
    return head


def test_the_shipped_head_is_the_default_of_its_model_only(shipped):
    chosen = choose("smollm2-135m")
    assert chosen == SpeculativeConfig(model=str(shipped), num_speculative_tokens=DEFAULT_NUM_SPECULATIVE_TOKENS)
    assert choose("smollm2-135m", num_speculative_tokens="7").num_speculative_tokens == 7
    assert choose("org/other") is None


def test_disabled_wins(shipped):
    assert choose("smollm2-135m", speculation=False) is None
    assert choose("m", head="d", speculation=False) is None


def test_without_the_folder_there_is_no_shipped_head(shipped):
    (shipped / "config.json").unlink()
    assert shipped_head("smollm2-135m") is None
    assert choose("smollm2-135m") is None


def test_flags_name_the_head():
    assert choose("m", head="d", num_speculative_tokens="3") == SpeculativeConfig(model="d", num_speculative_tokens=3)
    json = '{"method": "eagle3", "model": "d", "num_speculative_tokens": 3, "parallel_drafting": true}'
    assert choose("m", speculative_config=json).num_speculative_tokens == 3
    with pytest.raises(PeagleError, match="leave out --head"):
        choose("m", speculative_config=json, head="d")
    with pytest.raises(PeagleError, match="add --head DIR"):
        choose("m", num_speculative_tokens="3")
    for k in ("9" * 5000, "-" + "9" * 5000, "\u0663"):
        with pytest.raises(PeagleError, match="must be an integer from 1 to 16"):
            choose("m", head="d", num_speculative_tokens=k)


@pytest.mark.parametrize(
    ("json", "says"),
    [
        ("[" * 100_000, "cannot be read"),
        ('{"num_speculative_tokens": ' + "1" * 5000 + "}", "cannot be read"),
        ("null", "a JSON null"),
        ('{"model": "d", "num_speculative_tokens": 3, "parallel_drafting": "true"}', "without quotes"),
    ],
)
def test_a_config_that_cannot_be_used(json, says):
    with pytest.raises(PeagleError, match=says):
        choose("m", speculative_config=json)


def test_an_empty_head_is_no_way_to_leave_it_out(shipped):
    with pytest.raises(PeagleError, match="--head is empty"):
        choose("smollm2-135m", head="")
