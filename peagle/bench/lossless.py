"""Where two answers part: at a near-tie that rounding decides, or for a reason that has to be found.

Drafts change how many rows share a matmul, and with it the rounding of sums. Where two tokens are nearly equally good,
that may choose the other one. A pass over the tokens before it, apart from any engine, says how far the two tokens were
from each other; less than the numerical noise is explained, and the noise is measured too: by how much the lead of the
best token over the next one differs when the same rows are computed in other numbers of rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.config import EngineConfig
from peagle.engine.build import resolve_kernels
from peagle.engine.request import RequestOutput
from peagle.models.layers import use_kernels
from peagle.models.target import Target
from peagle.sampling import gumbel_noise

NOISE_SEQUENCES, NOISE_ROWS = 16, 32


@dataclass(frozen=True, kw_only=True, slots=True)
class EqualityRow:
    """How many answers were the same tokens with drafts as without; `explained` says that every other one parts at a
    near-tie: its `largest_gap` is below `limit`, the noise in the same units."""

    num_speculative_tokens: int
    temperature: float
    prompts: int
    equal: int
    tokens_compared: int
    first_divergence: int | None
    largest_gap: float | None
    limit: float | None
    explained: bool


class Judge:
    """Says of a target's tokens how far they lie apart, and how far rounding moves them. Needs no engine; one that is
    built on the target must not run at the same time."""

    def __init__(self, target: Target, device: torch.device) -> None:
        self._target, self._device = target, device
        self._known: dict[tuple[int, ...], Tensor] = {}  # logits after a prefix: runs often part at the same place

    def noise(self, outputs: Sequence[RequestOutput]) -> tuple[float, float]:
        """By how much the best token's lead over the next one differs between passes in other numbers of rows and by
        other forms of the kernels: the most of all places looked at, and the mean."""
        spreads: list[Tensor] = []
        forms = {"torch", resolve_kernels(EngineConfig(), self._device)}
        for output in outputs[:NOISE_SEQUENCES]:
            ids = [*output.prompt_token_ids, *output.token_ids]
            last = min(NOISE_ROWS, len(ids))
            ways = [self.logits(ids, last, rows, form) for form in forms for rows in (1, 8, len(ids))]
            best_R2 = ways[0].topk(2).indices
            lead_WR = torch.stack([way.gather(1, best_R2) for way in ways]).diff().squeeze(-1)
            spreads.append(lead_WR.amax(dim=0) - lead_WR.amin(dim=0))
        spread = torch.cat(spreads)
        return float(spread.max()), float(spread.mean())

    def gap(self, prefix: list[int], tokens: list[int], temperature: float, seed: int) -> float | None:
        """How far the worse of two tokens is below the best one, of logits, or of what the noise made of them; None
        where one answer has ended (-1) and there is nothing to weigh."""
        if min(tokens) < 0:
            return None
        if tuple(prefix) not in self._known:
            self._known[tuple(prefix)] = self.logits(prefix, 1, len(prefix), "torch")[0]
        score_V = self._known[tuple(prefix)]
        if temperature > 0:
            at = torch.tensor([seed, len(prefix)], device=self._device)
            ids_V = torch.arange(len(score_V), device=self._device)
            score_V = score_V / temperature + gumbel_noise(at[:1], at[1:], ids_V)[0]
        return float(score_V.max() - score_V[tokens].min())

    @torch.inference_mode()
    def logits(self, ids: list[int], last: int, rows: int, kernels: str) -> Tensor:
        """Logits [last, V] after the last tokens of a sequence: what is before them in one pass, they `rows` a pass;
        all in one pass where `rows` is the whole."""
        model = self._target.model
        attend = DenseCache(self._target.spec.windows, model.sinks)
        use_kernels(model, kernels)  # the next engine chooses for itself again
        ids_R = torch.tensor(ids, device=self._device)
        positions_R = torch.arange(len(ids), device=self._device)
        first = len(ids) - last if rows < len(ids) else 0
        hidden = [model(ids_R[:first], positions_R[:first], attend)[0]] if first else []
        for at in range(first, len(ids), rows):
            hidden.append(model(ids_R[at : at + rows], positions_R[at : at + rows], attend)[0])
        return torch.cat([model.logits(h).float() for h in torch.cat(hidden)[-last:].split(rows)])


class DenseCache:
    """Keys and values of one sequence, and causal attention over them, written as the formula says.

    `windows` and `sinks` by layer, as `PagedCache` has them; None: no layer has any.
    """

    def __init__(
        self, windows: Sequence[int | None] | None = None, sinks: Sequence[Tensor | None] | None = None
    ) -> None:
        self._windows, self._sinks = windows, sinks
        self._held: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q_RND: Tensor, k_RMD: Tensor, v_RMD: Tensor) -> Tensor:
        if layer in self._held:
            k_RMD, v_RMD = (torch.cat(pair) for pair in zip(self._held[layer], (k_RMD, v_RMD)))
        self._held[layer] = k_RMD, v_RMD
        rows, keys, group = len(q_RND), len(k_RMD), q_RND.shape[1] // k_RMD.shape[1]
        k_KND, v_KND = (x.float().repeat_interleave(group, dim=1) for x in (k_RMD, v_RMD))
        at_K = torch.arange(keys, device=q_RND.device)
        hidden_RK = at_K[None] > at_K[keys - rows :, None]
        if self._windows and (window := self._windows[layer]) is not None:
            hidden_RK |= at_K[None] <= at_K[keys - rows :, None] - window
        scores_NRK = torch.einsum("rnd,knd->nrk", q_RND.float(), k_KND) * q_RND.shape[-1] ** -0.5
        scores_NRK = scores_NRK.masked_fill(hidden_RK, float("-inf"))
        if self._sinks and (sinks_N := self._sinks[layer]) is not None:
            sinks_NR1 = sinks_N.float()[:, None, None].expand(-1, rows, 1)
            scores_NRK = torch.cat((scores_NRK, sinks_NR1), dim=-1)
        weights_NRK = scores_NRK.softmax(dim=-1)[..., :keys]
        return torch.einsum("nrk,knd->rnd", weights_NRK, v_KND).to(q_RND.dtype)


def compare_answers(
    judge: Judge,
    drafted: Sequence[RequestOutput],
    plain: Sequence[RequestOutput],
    seeds: Sequence[int],
    *,
    num_drafts: int,
    temperature: float,
) -> EqualityRow:
    """The same prompts answered with drafts and without. What differs is weighed; noise is measured only then."""
    compared, parted, gaps = 0, [], []
    for output, expected, seed in zip(drafted, plain, seeds, strict=True):
        index = common_length(output.token_ids, expected.token_ids)
        if output.token_ids == expected.token_ids:
            compared += index
            continue
        compared += index + 1
        tokens = [(o.token_ids[index : index + 1] or [-1])[0] for o in (expected, output)]
        parted.append(index)
        gaps.append(judge.gap([*expected.prompt_token_ids, *expected.token_ids[:index]], tokens, temperature, seed))
    limit = judge.noise(plain)[0] / (temperature or 1.0) if parted else None
    known = [gap for gap in gaps if gap is not None]
    return EqualityRow(
        num_speculative_tokens=num_drafts,
        temperature=temperature,
        prompts=len(plain),
        equal=len(plain) - len(parted),
        tokens_compared=compared,
        first_divergence=min(parted, default=None),
        largest_gap=max(known, default=None),
        limit=limit,
        explained=all(gap is not None and limit is not None and gap < limit for gap in gaps),
    )


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two answers begin with alike."""
    differ = (i for i, pair in enumerate(zip(first, second)) if pair[0] != pair[1])
    return next(differ, min(len(first), len(second)))
