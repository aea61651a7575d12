"""Compilation of kernels for a Hopper GPU, which needs none."""

from typing import Any


def compile_for_hopper(
    fn: Any,
    kinds: dict[str, str],
    warps: int,
    stages: int | None = None,
    registers: int | None = None,
    **constants: object,
) -> Any:
    """What Triton makes of a kernel of bfloat16 tensors, all aligned; `kinds` names the arguments of other types.

    Kernels of Gluon have `kinds` for what TMA is told too."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    kinds = {name: "i64" for name in fn.arg_names if name.endswith("_stride")} | kinds
    signature = {name: "constexpr" if name in constants else kinds.get(name, "*bf16") for name in fn.arg_names}
    aligned = [i for i, kind in enumerate(signature.values()) if kind == "i64" or kind.startswith("*")]
    source = (GluonASTSource if isinstance(fn, GluonJITFunction) else ASTSource)(
        fn, signature, constexprs={(fn.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )  # fmt: skip
    options = {"num_warps": warps} | {
        name: value for name, value in (("num_stages", stages), ("maxnreg", registers)) if value is not None
    }
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def before_the_wait(ptx: str) -> str:
    """What a kernel does while the one before it may still run; the wait is there, and the next may start after it."""
    before, after = ptx.split("griddepcontrol.wait")
    assert "griddepcontrol.launch_dependents" in after
    return before
