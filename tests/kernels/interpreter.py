"""Triton decides at import whether it interprets, so the CPU tests of a kernel run in a process of their own."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # this is that process


def run_interpreted(file: str) -> None:
    """Run the tests of `file` with "interpreted" in their names in Triton's interpreter; all of them must pass."""
    plugins = ("-p", "no:cacheprovider", "-p", "no:schemathesis")  # which takes two seconds to load
    command = (sys.executable, "-m", "pytest", "-q", *plugins, "-k", "interpreted", file)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "skipped" not in result.stdout


def hasten() -> None:
    """Let Triton 3.6 interpret two to four times as fast: it names types, patches its own language at each launch and
    call, and computes overflows that it says nothing about outside of its debug mode. Others stay as they are."""
    if not find_spec("triton") or not version("triton").startswith("3.6."):
        return
    from triton import language
    from triton.language import core
    from triton.runtime import interpreter

    interpreter._patch_lang = _patched_once(interpreter, {"tl": language, "core": core})
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    options = interpreter.interpreter_builder.options
    assert not options.debug
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    core.block_type.__init__ = _known_block(core.block_type.__init__)
    core.tensor.__init__ = _known_tensor(core.tensor.__init__)
    core.tuple.__init__ = _typed_late(core.tuple.__init__)
    core.tuple.type = cached_property(lambda self: core._type_for_tuple_values(self.values))
    core.tuple.type.__set_name__(core.tuple, "type")


def _patched_once(interpreter: Any, modules: dict[str, Any]) -> Callable[[Any], Any]:
    """The language stays patched from the first launch on, until a fixture changes how that is done."""
    patch, nothing = interpreter._patch_lang, interpreter._LangPatchScope()
    state: dict[str, Any] = {"how": None, "scope": nothing}

    def patched(fn: Any) -> Any:
        if state["how"] is not interpreter._patch_lang_tensor:
            state["scope"].restore()
            state.update(how=interpreter._patch_lang_tensor, scope=patch(SimpleNamespace(__globals__=modules)))
        return nothing

    return patched


def _by_name(np_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known: dict[str, Any] = {}

    def known_dtype(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = np_dtype(kind.scalar)
        return known[name]

    return known_dtype


def _known_block(init: Callable[..., None]) -> Callable[..., None]:
    known: dict[Any, dict[str, Any]] = {}

    def known_block(self: Any, element_ty: Any, shape: Sequence[Any]) -> None:
        key = (element_ty.name, *[getattr(size, "value", size) for size in shape])
        if key not in known:
            init(self, element_ty, shape)
            known[key] = self.__dict__
        self.__dict__.update(known[key])

    return known_block


def _known_tensor(init: Callable[..., None]) -> Callable[..., None]:
    known: dict[str, dict[str, Any]] = {}

    def known_tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in known:
            init(self, handle, type)
            known[type.name] = {name: self.__dict__[name] for name in ("shape", "numel", "dtype")}
        self.__dict__.update(known[type.name], handle=handle, type=type)

    return known_tensor


def _typed_late(init: Callable[..., None]) -> Callable[..., None]:
    """The type of a tuple is as long as the tuple, and hardly anyone asks for it."""

    def typed_late(self: Any, args: Any, type: Any = None) -> None:
        if type is None:
            self.values = [*args]
        else:
            init(self, args, type)

    return typed_late
