"""Which head a command uses: the flags of the command line, and the heads that ship with the project."""

from dataclasses import dataclass
from pathlib import Path

import peagle
from peagle.config import SpeculativeConfig
from peagle.errors import PeagleError

DEFAULT_NUM_SPECULATIVE_TOKENS = 5
_SHIPPED_HEADS = (("smollm2-135m", "smollm2-135m-instruct-p-eagle"),)


def shipped_head(model: str) -> Path | None:
    """Folder of the head that ships for a named model; None if none does or if it was not installed."""
    package = Path(peagle.__file__).parent
    for name, folder in _SHIPPED_HEADS:
        # A checkout keeps heads/ beside the package, an installed wheel inside it.
        for home in (package.parent / "heads", package / "heads"):
            if name == model and (home / folder / "config.json").is_file():
                return home / folder
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationFlags:
    """What a command line says of drafts. `num_speculative_tokens` is a number or "auto", as it was typed.

    Without `speculation` nothing else counts, so that the flag can be appended to any command line for comparison.
    """

    speculative_config: str | None = None
    head: str | None = None
    num_speculative_tokens: str | None = None
    speculation: bool = True


def choose_speculation(model: str, flags: SpeculationFlags) -> SpeculativeConfig | None:
    """The speculative config that the flags ask for; None means plain decoding.

    Without a flag the model's shipped head is used, if there is one.
    """
    if not flags.speculation:
        return None
    head, k = flags.head, flags.num_speculative_tokens
    if flags.speculative_config is not None:
        if head is not None or k is not None:
            raise PeagleError(
                "--speculative-config already names head and K: leave out --head, --num-speculative-tokens"
            )
        return SpeculativeConfig.from_json(flags.speculative_config)
    if head == "":
        raise PeagleError("--head is empty: give a head directory or Hub id, or --no-speculation to decode without")
    chosen = shipped_head(model) if head is None else head
    if chosen is None:
        if k is not None:
            raise PeagleError(f"--num-speculative-tokens needs a head and none ships for {model}: add --head DIR")
        return None
    if k is None:
        return SpeculativeConfig(model=str(chosen), num_speculative_tokens=DEFAULT_NUM_SPECULATIVE_TOKENS)
    is_number = k.isascii() and k.removeprefix("-").isdecimal() and len(k) < 10  # others stay what they are
    return SpeculativeConfig(model=str(chosen), num_speculative_tokens=int(k) if is_number else k)
