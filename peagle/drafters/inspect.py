"""`peagle inspect`: what a head is, what it fits and everything that is wrong with it, without ever raising."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.drafters import layout, storage
from peagle.drafters.checkpoint import (
    BASE_MODEL_KEY,
    PROVENANCE_KEY,
    SHARED_KEY,
    TARGET_HASH_KEY,
    check_compatible,
    resolve_head,
)
from peagle.drafters.eagle3 import DrafterConfig
from peagle.drafters.head_config import (
    ARCHITECTURE,
    EXPLICIT_KEYS,
    MASK_ID_KEYS,
    TAP_KEY,
    config_from_dict,
    lookup,
    mask_token_ids,
    refuse_target,
)
from peagle.drafters.vocab import target_ids
from peagle.errors import PeagleError
from peagle.models.spec import ModelSpec

_KNOWN_ARCHITECTURES = {ARCHITECTURE, "Eagle3LlamaForCausalLM"}


_STORAGE = ("compact", "int8")  # recipe keys that say how a head is stored, not how it was trained


@dataclass(kw_only=True)
class HeadReport:
    """What is known about a head. `config` is None when config.json cannot be used; `problems` then says why."""

    path: Path
    config: DrafterConfig | None = None
    architecture: str = "unknown"
    storage: str = "unknown"  # "full", "compact" or "compact, int8 layers"
    shared: list[str] = field(default_factory=list)
    num_parameters: int = 0  # stored ones: shared tables are not counted
    size_bytes: int = 0  # of config.json and the safetensors files
    base_model: str = "not stated"
    provenance: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The report for a terminal, one fact a line."""
        kind = "unknown" if self.config is None else self.config.kind
        rows = [("head", str(self.path)), ("type", f"{kind} ({self.architecture})"), ("storage", self._storage())]
        if self.config is not None:
            rows += _config_rows(self.config)
        rows.append(("made for", self.base_model))
        rows += _provenance_rows(self.provenance)
        lines = [f"{name:<24} {value}" for name, value in rows]
        if not self.problems:
            return [*lines, f"{'problems':<24} none"]
        return [*lines, f"{'problems':<24} {len(self.problems)}", *(f"  - {problem}" for problem in self.problems)]

    def _storage(self) -> str:
        shared = f", shares {' and '.join(self.shared)} with its target" if self.shared else ""
        size = f"{self.size_bytes / 1e6:.1f} MB on disk"
        return f"{self.storage}, {self.num_parameters / 1e6:.2f} M parameters stored, {size}{shared}"


def inspect_head(path: Path | str, spec: ModelSpec | None = None) -> HeadReport:
    """Examine the head at `path` (directory or Hub id), and whether it fits `spec` if given. Raises nothing."""
    report = HeadReport(path=Path(path))
    try:
        report.path = resolve_head(path)
        raw = storage.read_config(report.path)
        refuse_target(raw, str(report.path))
        report.size_bytes = sum(file.stat().st_size for file in _own_files(report.path))
    except (PeagleError, OSError) as error:
        report.problems.append(str(error))
        return report
    except (ValueError, RecursionError) as error:  # JSON with an integer of thousands of digits, a thousand brackets
        report.problems.append(f"{report.path}: config.json cannot be read ({error}); restore the file")
        return report
    _read_identity(report, raw)
    try:
        report.config = config_from_dict(raw, target_layers=spec.num_layers if spec else None, where="head")
        if spec is not None:
            check_compatible(report.config, spec)
    except PeagleError as error:
        report.problems.append(str(error))
    report.problems += _config_problems(raw)
    try:
        stored = storage.read_stored(report.path)
    except PeagleError as error:
        report.problems.append(str(error))
        return report
    _examine_tensors(report, stored)
    return report


def _own_files(path: Path) -> list[Path]:
    return [file for file in path.iterdir() if file.name == storage.CONFIG_FILE or ".safetensors" in file.name]


def _any(tensor: Tensor) -> bool:
    """Whether anything is not zero; of any dtype, where `Tensor.any` knows no 8-bit floats."""
    return bool(tensor.float().any())


def _read_identity(report: HeadReport, raw: Mapping[str, Any]) -> None:
    named, shared, provenance = (raw.get(key) for key in ("architectures", SHARED_KEY, PROVENANCE_KEY))
    report.architecture = ", ".join(map(str, named)) if isinstance(named, list) else "unknown"
    report.shared = [str(name) for name in shared] if isinstance(shared, list) else []
    report.base_model = str(raw.get(BASE_MODEL_KEY, "not stated"))
    report.provenance = dict(provenance) if isinstance(provenance, dict) else {}


def _provenance_rows(provenance: Mapping[str, Any]) -> list[tuple[str, str]]:
    """How the head was trained, short values only; how it was stored then may have changed since."""
    rows = []
    for key, value in provenance.items():
        if isinstance(value, Mapping):
            told = [(name, v) for name, v in value.items() if isinstance(v, int | float | str) and name not in _STORAGE]
            value = ", ".join(f"{name} {v:.4g}" if isinstance(v, float) else f"{name} {v}" for name, v in told)
        rows.append((f"training {key.removeprefix('training_')}".replace("_", " "), str(value)))
    return rows


def _config_rows(config: DrafterConfig) -> list[tuple[str, str]]:
    c = config
    heads = f"{c.num_heads}/{c.num_kv_heads} heads of {c.head_dim}"
    switches = [name for name in ("norm_before_fc", "norm_before_residual", "attention_bias") if getattr(c, name)]
    vocabulary = "the target's" if c.draft_vocab_size == c.vocab_size else f"{c.draft_vocab_size} of {c.vocab_size}"
    depth = max(c.tap_ids)
    return [
        ("layers", f"{c.num_layers}, hidden {c.hidden_size}, feed-forward {c.intermediate_size}, {heads}"),
        ("switches", ", ".join(switches) or "none"),
        ("attention", _attention(c)),
        ("taps", f"{list(c.tap_ids)} (streams entering these target layers)"),
        ("mask token", "none: drafts one token at a time" if c.mask_token_id is None else str(c.mask_token_id)),
        ("draft vocab", vocabulary),
        ("fits targets", f"hidden {c.target_hidden_size}, vocabulary {c.vocab_size}, at least {depth} layers"),
    ]


def _attention(config: DrafterConfig) -> str:
    sliding = [str(layer) for layer, window in enumerate(config.windows) if window is not None]
    if not sliding:
        return "full in every layer"
    return f"last {config.sliding_window} positions in layers {', '.join(sliding)}" + (
        ", full in the others" if len(sliding) < config.num_layers else " (all)"
    )


def _config_problems(raw: Mapping[str, Any]) -> list[str]:
    problems = []
    rope_inside = isinstance(raw.get("rope_parameters"), Mapping) and "rope_theta" in raw["rope_parameters"]
    absent = [key for key in EXPLICIT_KEYS if lookup(raw, key) is None and not (key == "rope_theta" and rope_inside)]
    if absent:
        problems.append(f"not explicit in config.json, readers fall back on their own defaults: {', '.join(absent)}")
    architectures = raw.get("architectures")
    if isinstance(architectures, list) and not _KNOWN_ARCHITECTURES & {str(name) for name in architectures}:
        problems.append(f"architectures is {architectures}: vLLM expects [{ARCHITECTURE!r}]")
    named = mask_token_ids(raw)
    if len({str(value) for value in named}) > 1:
        problems.append(f"{', '.join(MASK_ID_KEYS)} disagree ({named}): readers pick different mask tokens")
    taps, count = lookup(raw, TAP_KEY), raw.get("num_aux_hidden_states")
    if isinstance(taps, list) and count is not None and count != len(taps):
        problems.append(f"num_aux_hidden_states is {count}, but {TAP_KEY} lists {len(taps)} ids")
    top, nested = raw.get(TAP_KEY), raw.get("eagle_config")
    inside = nested.get(TAP_KEY) if isinstance(nested, Mapping) else None
    if top is not None and inside is not None and top != inside:
        problems.append(f"{TAP_KEY} is {top} at the top level, but {inside} inside eagle_config")
    if raw.get(SHARED_KEY) and not raw.get(TARGET_HASH_KEY):
        problems.append(f"{SHARED_KEY} without {TARGET_HASH_KEY}: the head cannot recognise its target")
    return problems


def _examine_tensors(report: HeadReport, stored: dict[str, Tensor]) -> None:
    """Fill in storage and size facts, and add every problem of the weights."""
    weights = {n: t for n, t in stored.items() if n not in ("d2t", "t2d") and not n.endswith(layout.SCALE_SUFFIX)}
    report.num_parameters = sum(tensor.numel() for tensor in weights.values())
    int8 = any(tensor.dtype == torch.int8 for tensor in weights.values())
    report.storage = ("compact" if report.shared else "full") + (", int8 layers" if int8 else "")
    for name, tensor in stored.items():
        bad = int((~tensor.float().isfinite()).sum()) if tensor.is_floating_point() else 0
        if bad:
            report.problems.append(f"{name} holds {bad} NaN or infinite values")
    try:
        storage.dequantized(stored, "head")
    except PeagleError as error:
        report.problems.append(str(error))
    if report.config is not None:
        report.problems += _layout_problems(weights | _vocabulary_maps(stored), report.config, report.shared)
    report.problems += _mask_problems(stored, report.config)


def _vocabulary_maps(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: stored[name] for name in ("d2t", "t2d") if name in stored}


def _layout_problems(tensors: dict[str, Tensor], config: DrafterConfig, shared: list[str]) -> list[str]:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    expected, problems = layout.expected_shapes(config), []
    for name in (layout.EMBED, layout.LM_HEAD):
        if name not in shapes:
            shapes[name] = expected[name]  # lent by the target
            if name not in shared:
                lost = ", so the trained mask row is lost" if config.parallel and name == layout.EMBED else ""
                problems.append(f"{name} is missing: the target's table is used in its place{lost}")
    if config.parallel and layout.EMBED in shared and layout.MASK_EMBEDDING not in shapes:
        problems.append(f"{layout.MASK_EMBEDDING} is missing, although {layout.EMBED} is shared: the mask row is lost")
    problems += layout.tensor_problems(shapes, config)
    unknown = [n for n in layout.unknown_tensors(tensors, config) if not n.endswith("o_proj.bias") or _any(tensors[n])]
    if unknown:
        problems.append(f"{len(unknown)} tensors the config does not account for: {', '.join(unknown[:3])}")
    if "d2t" in tensors and shapes["d2t"] == expected["d2t"]:
        problems += _d2t_problems(tensors, config)
    return problems


def _d2t_problems(tensors: Mapping[str, Tensor], config: DrafterConfig) -> list[str]:
    try:
        ids = target_ids(layout.read_d2t(tensors, config, "head"))
    except PeagleError as error:
        return [str(error)]
    problems = []
    if bool((ids.diff() <= 0).any()):
        problems.append("d2t does not give strictly increasing target ids: tokens are duplicated or out of order")
    t2d = tensors.get("t2d")
    if t2d is not None and tuple(t2d.shape) == (config.vocab_size,):
        listed = torch.zeros(config.vocab_size, dtype=torch.bool)
        listed[ids] = True
        if not torch.equal(t2d.bool(), listed):
            problems.append("t2d does not mark the ids that d2t maps to")
    return problems


def _mask_problems(stored: Mapping[str, Tensor], config: DrafterConfig | None) -> list[str]:
    problems: list[str] = []
    hidden, row, embed = (stored.get(name) for name in (layout.MASK_HIDDEN, layout.MASK_EMBEDDING, layout.EMBED))
    if hidden is not None and not _any(hidden):
        problems.append(f"{layout.MASK_HIDDEN} is all zeros: it was never trained")
    mask_id = config.mask_token_id if config else None
    if row is None and mask_id is not None and embed is not None and embed.ndim == 2 and mask_id < embed.shape[0]:
        row = embed[mask_id]
    if row is not None and not _any(row):
        problems.append("the mask token's embedding is all zeros: it was never trained")
    return problems
