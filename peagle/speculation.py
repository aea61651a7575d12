"""Which head a command uses: the flags of the command line, and the heads that ship with the project."""

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


def choose_speculation(
    model: str,
    *,
    speculative_config: str | None = None,
    head: str | None = None,
    num_speculative_tokens: int | str | None = None,
    disabled: bool = False,
) -> SpeculativeConfig | None:
    """The speculative config that the flags ask for; None means plain decoding.

    `disabled` wins over everything, so that it can be appended to any command line for comparison. Without a flag the
    model's shipped head is used, if there is one.
    """
    if disabled:
        return None
    if speculative_config is not None:
        if head is not None or num_speculative_tokens is not None:
            raise PeagleError(
                "--speculative-config already names head and K: leave out --head, --num-speculative-tokens"
            )
        return SpeculativeConfig.from_json(speculative_config)
    if head == "":
        raise PeagleError("--head is empty: give a head directory or Hub id, or --no-speculation to decode without")
    chosen = shipped_head(model) if head is None else head
    if chosen is None:
        if num_speculative_tokens is not None:
            raise PeagleError(f"--num-speculative-tokens needs a head and none ships for {model}: add --head DIR")
        return None
    k = DEFAULT_NUM_SPECULATIVE_TOKENS if num_speculative_tokens is None else num_speculative_tokens
    if isinstance(k, str) and k.removeprefix("-").isdecimal():  # as a flag gives it; "auto" stays what it is
        k = int(k)
    return SpeculativeConfig(model=str(chosen), num_speculative_tokens=k)
