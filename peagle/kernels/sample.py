"""The sampling rule over rows of logits (`peagle.sampling`): no sort, no softmax, one reading without filters."""

import torch
from torch import Tensor

from peagle.kernels.backend import use_triton
from peagle.sampling import RowSampling, sample_tokens


def sample(
    logits_RV: Tensor, rows: RowSampling | None, token_ids_V: Tensor | None = None, *, backend: str = "auto"
) -> Tensor:
    """The token that the sampling rule picks of each row, int64 [R]; `rows` None means every row is greedy.

    `token_ids_V` holds the target id of each column where the columns are a draft vocabulary, and the result is such an
    id. Greedy and drawn rows may mix; the first of equal maxima wins and a NaN beats every number, as in torch. float64
    is not what the kernels compute in: it goes to torch whatever the `backend`, which else is Triton on CUDA if "auto".
    """
    form = sample_ref
    if logits_RV.dtype != torch.float64 and use_triton(backend, logits_RV.device):
        from peagle.kernels.sample_triton import sample_triton as form
    return form(logits_RV, rows, token_ids_V)


def sample_ref(logits_RV: Tensor, rows: RowSampling | None, token_ids_V: Tensor | None = None) -> Tensor:
    """The torch form of `sample`."""
    column_R = sample_tokens(logits_RV, rows, token_ids_V)
    return column_R if token_ids_V is None else token_ids_V[column_R]
