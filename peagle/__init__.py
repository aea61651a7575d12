"""P-EAGLE speculative decoding: train a parallel drafter, measure it, generate losslessly with it.

The names below load on first use, so that `peagle --help` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peagle.acceptance import AcceptanceStats
    from peagle.config import SpeculativeConfig
    from peagle.engine.engine import LLM
    from peagle.engine.request import RequestOutput
    from peagle.errors import PeagleError
    from peagle.sampling import SamplingParams
    from peagle.structured.outputs import StructuredOutputs

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AcceptanceStats",
    "PeagleError",
    "RequestOutput",
    "SamplingParams",
    "SpeculativeConfig",
    "StructuredOutputs",
]

_MODULE_OF = (
    ("LLM", "peagle.engine.engine"),
    ("RequestOutput", "peagle.engine.request"),
    ("SamplingParams", "peagle.sampling"),
    ("AcceptanceStats", "peagle.acceptance"),
    ("SpeculativeConfig", "peagle.config"),
    ("PeagleError", "peagle.errors"),
    ("StructuredOutputs", "peagle.structured.outputs"),
)


def __getattr__(name: str) -> Any:
    for public, module in _MODULE_OF:
        if name == public:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'peagle' has no attribute {name!r}")
