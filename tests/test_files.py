"""Files that are whole or not there, and as readable as any other."""

import errno

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from peagle.errors import PeagleError
from peagle.files import replacing, save_tensors, write_atomic


def test_tensors_get_the_permissions_of_any_other_file(tmp_path):
    save_tensors(tmp_path / "a.safetensors", {"x": torch.arange(3)})
    (tmp_path / "b.txt").write_text("b")
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1
    assert load_file(tmp_path / "a.safetensors")["x"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(("text", "number"), [("I/O error (os error 28)", errno.ENOSPC), ("something", errno.EIO)])
def test_an_error_of_safetensors_is_one_of_the_system(tmp_path, monkeypatch, text, number):
    def fail(*arguments, **named):
        raise SafetensorError(text)

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(OSError, match=text[:9]) as raised:
        save_tensors(tmp_path / "a.safetensors", {})
    assert raised.value.errno == number


def fail_to_replace(path, error):
    with replacing(path) as temporary:
        temporary.write_text("new")
        raise error


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.txt"
    write_atomic(path, b"old")
    for error, seen in ((OSError(errno.ENOSPC, "full"), PeagleError), (KeyboardInterrupt(), KeyboardInterrupt)):
        with pytest.raises(seen):
            fail_to_replace(path, error)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("a.txt", "old")]


def test_a_link_stays_and_its_target_is_replaced(tmp_path):
    (tmp_path / "there").mkdir()
    link, target = tmp_path / "link.txt", tmp_path / "there" / "target.txt"
    link.symlink_to(target)
    for text in ("new", "newer"):  # at first the link leads nowhere
        write_atomic(link, text.encode())
        assert (link.is_symlink(), target.read_text()) == (True, text)
    assert [file.name for file in target.parent.iterdir()] == ["target.txt"]
