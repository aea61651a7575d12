"""Whether two directories hold the same model: its small files whole, its weights without reading gigabytes."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from peagle.errors import PeagleError
from peagle.files import sha256_of
from peagle.models.weights import weight_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Of each file: this many blocks of this many bytes, evenly spaced, the first one with names, shapes and dtypes in it.
# Any training run changes nearly every weight, so a sample of a few hundred KB tells its results apart.
BLOCKS = 64
BLOCK_BYTES = 4096


def weights_fingerprint(path: Path) -> str:
    """SHA-256 over the size and a sample of every safetensors file of the model at `path`, in order.

    Equal weights cut into other files have another fingerprint. Raises PeagleError when a file cannot be read.
    """
    digest = hashlib.sha256()
    for file in weight_files(path):
        try:
            with file.open("rb") as stream:
                size = stream.seek(0, 2)
                digest.update(f"{size}\n".encode())
                for start in _starts(size):
                    stream.seek(start)
                    digest.update(stream.read(BLOCK_BYTES))
        except OSError as error:
            raise PeagleError(f"cannot read {file} ({error.strerror}): check the file") from None
    return digest.hexdigest()


def file_sha256(file: Path) -> str | None:
    """None for a file that is not there: a tokenizer may come without a tokenizer.json. Raises PeagleError."""
    try:
        return sha256_of(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PeagleError(f"cannot read {file} ({error.strerror}): check the file") from None


def template_sha256(tokenizer: "PreTrainedTokenizerFast") -> str:
    """Identity of a tokenizer's chat template."""
    return hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()


def _starts(size: int) -> list[int]:
    """Offsets of the sampled blocks, from the first byte to the last."""
    last = max(0, size - BLOCK_BYTES)
    return sorted({last * block // (BLOCKS - 1) for block in range(BLOCKS)})
