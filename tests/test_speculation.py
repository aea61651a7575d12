"""Which head the flags choose."""

import pytest

from peagle import speculation
from peagle.config import SpeculativeConfig
from peagle.errors import PeagleError
from peagle.speculation import DEFAULT_NUM_SPECULATIVE_TOKENS, choose_speculation, shipped_head


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A checkout that ships a head."""
    head = tmp_path / "heads" / "smollm2-135m-instruct-p-eagle"
    head.mkdir(parents=True)
    (head / "config.json").write_text("{}")
    monkeypatch.setattr(speculation.peagle, "__file__", str(tmp_path / "peagle" / "__init__.py"))
    return head


def test_the_shipped_head_is_the_default_of_its_model_only(shipped):
    chosen = choose_speculation("smollm2-135m")
    assert chosen == SpeculativeConfig(model=str(shipped), num_speculative_tokens=DEFAULT_NUM_SPECULATIVE_TOKENS)
    assert choose_speculation("smollm2-135m", num_speculative_tokens=7).num_speculative_tokens == 7
    assert choose_speculation("org/other") is None


def test_disabled_wins(shipped):
    assert choose_speculation("smollm2-135m", disabled=True) is None
    assert choose_speculation("m", head="d", disabled=True) is None


def test_without_the_folder_there_is_no_shipped_head(shipped):
    (shipped / "config.json").unlink()
    assert shipped_head("smollm2-135m") is None
    assert choose_speculation("smollm2-135m") is None


def test_flags_name_the_head():
    assert choose_speculation("m", head="d", num_speculative_tokens=3) == SpeculativeConfig(
        model="d", num_speculative_tokens=3
    )
    json = '{"method": "eagle3", "model": "d", "num_speculative_tokens": 3, "parallel_drafting": true}'
    assert choose_speculation("m", speculative_config=json).num_speculative_tokens == 3
    with pytest.raises(PeagleError, match="leave out --head"):
        choose_speculation("m", speculative_config=json, head="d")
    with pytest.raises(PeagleError, match="add --head DIR"):
        choose_speculation("m", num_speculative_tokens=3)


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
        choose_speculation("m", speculative_config=json)


def test_an_empty_head_is_no_way_to_leave_it_out(shipped):
    with pytest.raises(PeagleError, match="--head is empty"):
        choose_speculation("smollm2-135m", head="")
