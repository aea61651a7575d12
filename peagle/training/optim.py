"""Optimisers of the recipe: Muon for the matrices of fc and the layers, AdamW for everything else.

Both keep float32 masters of parameters in a narrower dtype, so small updates are not rounded away.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from peagle.errors import PeagleError
from peagle.models.layers import MergedLinear

if TYPE_CHECKING:
    from peagle.training.sharding import OwnRows

OptimizerKind = Literal["muon", "adamw"]

MOMENTUM = 0.95
NEWTON_SCHULZ_STEPS = 5
# Keller Jordan's quintic: steep at zero, so small singular values grow fast; they end up within about 0.7 to 1.2.
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
UPDATE_SCALE = 0.2  # times sqrt(larger side): an orthogonal update then has about AdamW's rms
ADAMW_BETAS = (0.9, 0.95)
ADAMW_EPS = 1e-8

EMBEDDING_LIKE = ("embed_tokens.weight", "lm_head.weight")  # matrices indexed by token: AdamW


def learning_rate_factor(step: int, total_steps: int, warmup: int) -> float:
    """Factor of the peak rate for 0-based `step`: linear up over `warmup` steps, then cosine down to 0."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, total_steps - warmup)
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


def newton_schulz(matrices_BXY: Tensor) -> Tensor:
    """Bring every singular value of each matrix (rows X <= columns Y) near 1, keeping its singular vectors.

    float32 in and out; the products run in bfloat16 on CUDA.
    """
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    x = matrices_BXY.to(torch.bfloat16) if matrices_BXY.is_cuda else matrices_BXY
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram_BXX = torch.bmm(x, x.mT)
        poly_BXX = torch.baddbmm(gram_BXX, gram_BXX, gram_BXX, beta=b, alpha=c)
        x = torch.baddbmm(x, poly_BXX, x, beta=a)
    return x.to(matrices_BXY.dtype)


class MasterOptimizer(torch.optim.Optimizer):
    """One group of parameters; those narrower than float32 get a float32 master, kept in the state as "master".

    State tensors appear at a parameter's first step and round-trip through state_dict without loss. Of a sharded
    drafter the parameters are this rank's rows, and `own` says which; so are the state tensors.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], lr: float, own: "Sequence[OwnRows] | None" = None) -> None:
        super().__init__(list(parameters), {"lr": lr, "peak_lr": lr})
        self.own = own
        device = self.parameters[0].device
        # On a GPU the rate is a tensor, so that a captured step reads the one of its time.
        self.rate_tensor = torch.tensor(lr, device=device) if device.type == "cuda" else None

    @property
    def rate(self) -> float | Tensor:
        """The rate of the next step."""
        rate: float = self.param_groups[0]["lr"]
        return rate if self.rate_tensor is None else self.rate_tensor

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters, in the order they were given."""
        trained: list[nn.Parameter] = self.param_groups[0]["params"]
        return trained

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore `state_dict`'s result. Raises ValueError if it is for other parameters."""
        super().load_state_dict(state_dict)
        # torch rounds the state of a bf16 parameter to bf16; a bit-equal resume needs the saved tensors themselves.
        for index, state in state_dict["state"].items():
            parameter = self.parameters[index]
            self.state[parameter] = {name: value.to(parameter.device, copy=True) for name, value in state.items()}

    def whole(self, index: int, state: Tensor) -> Tensor:
        """All of a state tensor of parameter number `index`; all ranks must call it."""
        return state if self.own is None or state.ndim == 0 else self.own[index].gather(state).cpu()

    def part(self, index: int, whole: Tensor) -> Tensor:
        """Inverse of `whole`."""
        return whole if self.own is None or whole.ndim == 0 else self.own[index].take(whole)

    def state_tensors(self, name: str, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """The state tensor `name` of each parameter: zeros of the master's kind at first."""
        states = [self.state[parameter] for parameter in parameters]
        for state, parameter in zip(states, parameters, strict=True):
            if name not in state:
                state[name] = torch.zeros_like(parameter, dtype=_master_dtype(parameter))
        return [state[name] for state in states]

    def masters(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """What the update is applied to: each parameter's master, or the parameter itself when it is wide enough."""
        values: list[Tensor] = []
        for parameter in parameters:
            if _master_dtype(parameter) != parameter.dtype:
                state = self.state[parameter]
                if "master" not in state:
                    state["master"] = parameter.detach().float()
                values.append(state["master"])
            else:
                values.append(parameter)
        return values

    def write_back(self, parameters: Sequence[nn.Parameter], masters: Sequence[Tensor]) -> None:
        """Round the masters into the parameters."""
        narrow = [(p, m) for p, m in zip(parameters, masters, strict=True) if p is not m]
        if narrow:
            torch._foreach_copy_([p for p, _ in narrow], [m for _, m in narrow])


@dataclass(frozen=True, slots=True)
class _Piece:
    """One matrix inside a parameter: rows [start, stop) of parameter number `index`."""

    index: int
    start: int
    stop: int
    flip: bool  # taller than wide: orthogonalised as its transpose

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        part = tensors[self.index][self.start : self.stop]
        return part.mT if self.flip else part

    def rows(self, tensor: Tensor, first: int) -> Tensor:
        """What of the piece lies in `tensor`, rows [first, first + len(tensor)) of the parameter; may be empty."""
        return tensor[max(self.start - first, 0) : max(self.stop - first, 0)]

    def update_for(self, rows: Tensor, first: int, update_XY: Tensor) -> Tensor:
        """The part of the piece's update that belongs to the result of `rows`."""
        update = update_XY.mT if self.flip else update_XY
        skipped = max(first - self.start, 0)
        return update[skipped : skipped + len(rows)]


class Muon(MasterOptimizer):
    """Momentum, then the nearest orthogonal matrix, as the update of every projection.

    Matrices of one shape are orthogonalised together. A merged projection counts as its separate parts. Of sharded
    parameters every rank gathers the whole matrices, computes the same updates and applies its own rows of them.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        splits: Sequence[tuple[int, ...]],
        lr: float,
        own: "Sequence[OwnRows] | None" = None,
    ) -> None:
        """`splits[i]` are the row counts of the projections merged into `parameters[i]`, all ranks' rows together."""
        super().__init__(parameters, lr, own)
        self._first = [0] * len(parameters) if own is None else [rows.first for rows in own]
        groups: dict[tuple[int, int], list[_Piece]] = defaultdict(list)
        for index, (parameter, sizes) in enumerate(zip(parameters, splits, strict=True)):
            columns = parameter.shape[1]
            stop = 0
            for rows in sizes:
                start, stop = stop, stop + rows
                groups[min(rows, columns), max(rows, columns)].append(_Piece(index, start, stop, rows > columns))
        self._groups = dict(groups)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # no closure: those are for line searches
        """One update; a parameter without a gradient counts as having a zero one."""
        parameters = self.parameters
        masters, momentum = self.masters(parameters), self.state_tensors("momentum", parameters)
        gradients = _gradients(parameters)
        torch._foreach_mul_(momentum, MOMENTUM)
        torch._foreach_add_(momentum, gradients)
        ahead = list(torch._foreach_add(gradients, momentum, alpha=MOMENTUM))  # Nesterov
        if self.own is not None:
            ahead = [rows.gather(local) for rows, local in zip(self.own, ahead)]
        for (_, longer), pieces in self._groups.items():
            update_BXY = newton_schulz(torch.stack([piece.of(ahead) for piece in pieces]))
            update_BXY *= self.rate * (-UPDATE_SCALE * math.sqrt(longer))
            first = [self._first[piece.index] for piece in pieces]
            rows = [piece.rows(masters[piece.index], start) for piece, start in zip(pieces, first)]
            updates = [p.update_for(r, f, u) for p, r, f, u in zip(pieces, rows, first, update_BXY)]
            torch._foreach_add_(rows, updates)
        self.write_back(parameters, masters)


class AdamW(MasterOptimizer):
    """AdamW without decay, torch's arithmetic (fused on CUDA) on float32 masters."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # no closure: those are for line searches
        """One update of every parameter that has a gradient."""
        parameters = [parameter for parameter in self.parameters if parameter.grad is not None]
        if not parameters:
            return
        masters = self.masters(parameters)
        adamw(
            masters,
            _gradients(parameters),
            self.state_tensors("exp_avg", parameters),
            self.state_tensors("exp_avg_sq", parameters),
            [],
            self._steps(parameters),
            fused=parameters[0].is_cuda,
            amsgrad=False,
            beta1=ADAMW_BETAS[0],
            beta2=ADAMW_BETAS[1],
            lr=self.rate,
            weight_decay=0.0,
            eps=ADAMW_EPS,
            maximize=False,
        )
        self.write_back(parameters, masters)

    def _steps(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        for parameter in parameters:
            if "step" not in self.state[parameter]:
                self.state[parameter]["step"] = torch.zeros((), device=parameter.device)
        return [self.state[parameter]["step"] for parameter in parameters]


def set_learning_rate(optimizers: Iterable[MasterOptimizer], factor: float) -> None:
    """Set every rate to `factor` times the peak rate it was built with."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
        if optimizer.rate_tensor is not None:
            optimizer.rate_tensor.fill_(optimizer.param_groups[0]["lr"])


def build_optimizers(
    drafter: nn.Module, lr_muon: float, lr_adamw: float, kind: OptimizerKind, own: "Mapping[str, OwnRows] | None" = None
) -> list[MasterOptimizer]:
    """Optimisers for the parameters of a drafter that require gradients; build them on the final device.

    "muon": matrices other than token tables go to Muon, the rest to AdamW. "adamw": everything goes to AdamW. `own`
    are this rank's rows of the trained parameters, by name, when the drafter is sharded.
    """
    if kind not in ("muon", "adamw"):
        raise PeagleError(f"optimiser {kind!r}: expected 'muon' or 'adamw'")
    matrices: list[str] = []
    others: list[str] = []
    trained = {name: parameter for name, parameter in drafter.named_parameters() if parameter.requires_grad}
    for name, parameter in trained.items():
        to_muon = kind == "muon" and parameter.ndim == 2 and not name.endswith(EMBEDDING_LIKE)
        (matrices if to_muon else others).append(name)
    merged = _merged_splits(drafter.modules())
    splits = [merged.get(id(trained[name]), (trained[name].shape[0],)) for name in matrices]
    optimizers: list[MasterOptimizer] = []
    if matrices:
        parameters, rows = _kept(matrices, trained, own)
        optimizers.append(Muon(parameters, splits, lr_muon, rows))
    if others:
        parameters, rows = _kept(others, trained, own)
        optimizers.append(AdamW(parameters, lr_adamw, rows))
    return optimizers


def _kept(
    names: Sequence[str], trained: Mapping[str, nn.Parameter], own: "Mapping[str, OwnRows] | None"
) -> "tuple[list[nn.Parameter], list[OwnRows] | None]":
    """What this rank keeps of the named parameters: all of them, or its rows."""
    if own is None:
        return [trained[name] for name in names], None
    rows = [own[name] for name in names]
    return [part.local for part in rows], rows


def _merged_splits(modules: Iterable[nn.Module]) -> dict[int, tuple[int, ...]]:
    """id of a merged weight -> rows of its parts."""
    return {id(module.weight): module.splits for module in modules if isinstance(module, MergedLinear)}


def _master_dtype(parameter: Tensor) -> torch.dtype:
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def _gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Gradients in the masters' dtype, zero where there is none."""
    wide = [torch.zeros_like(p, dtype=_master_dtype(p)) if p.grad is None else p.grad for p in parameters]
    narrow = [index for index, (g, p) in enumerate(zip(wide, parameters, strict=True)) if g.dtype != _master_dtype(p)]
    if narrow:
        copies = [torch.empty_like(wide[index], dtype=_master_dtype(wide[index])) for index in narrow]
        torch._foreach_copy_(copies, [wide[index] for index in narrow])
        for index, copy in zip(narrow, copies, strict=True):
            wide[index] = copy
    return wide
