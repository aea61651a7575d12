"""The training-time test against a token-by-token simulation, and against what the engine computes while drafting."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from peagle.config import EngineConfig
from peagle.drafters.eagle3 import DrafterConfig, Eagle3Drafter
from peagle.engine.engine import LLM
from peagle.engine.request import Request
from peagle.errors import PeagleError
from peagle.models.layers import RopeSpec
from peagle.sampling import SamplingParams
from peagle.training.rows import Rows
from peagle.training.ttt import ttt_hidden
from tests.engine.tiny import drafts_of, random_prompts, tiny_parts
from tests.helpers import causal_attend, random_weights

VOCAB, K = 50, 4
LENGTHS = (7, 1, 2, 9)  # positions of the packed documents
PADDING = 3


def tiny_eagle3(num_layers: int = 2, **changes: object) -> Eagle3Drafter:
    sizes = dict(
        hidden_size=16, intermediate_size=24, num_layers=num_layers, num_heads=4, num_kv_heads=2, head_dim=8,
        rms_norm_eps=1e-5, rope=RopeSpec(theta=1e4, head_dim=8), max_position_embeddings=128, vocab_size=VOCAB,
        draft_vocab_size=VOCAB, target_hidden_size=12, tap_ids=(1, 2, 3), mask_token_id=None,
    )  # fmt: skip
    drafter = Eagle3Drafter(DrafterConfig(**{**sizes, **changes}))
    random_weights(drafter, seed=3)
    return drafter.double()


def rows_of(doc: np.ndarray) -> Rows:
    """Depth-0 rows of packed documents."""
    starts = np.maximum.accumulate(np.where(np.diff(doc, prepend=-2) != 0, np.arange(len(doc)), 0))
    index, real = np.arange(len(doc)), doc >= 0
    arrays = dict(
        anchor_R=index, depth_R=0 * index, doc_R=doc, position_R=np.where(real, index - starts, 0),
        target_R=np.where(real, index, 0), supervised_R=real,
    )  # fmt: skip
    return Rows(**{name: torch.from_numpy(array) for name, array in arrays.items()})


def pack(drafter: Eagle3Drafter, seed: int = 0) -> tuple[np.ndarray, Tensor, Tensor]:
    """Documents of LENGTHS and padding: document numbers, tokens, taps."""
    doc = np.concatenate((np.repeat(np.arange(len(LENGTHS)), LENGTHS), np.full(PADDING, -1)))
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (len(doc),), generator=generator)
    return doc, ids, torch.randn(len(doc), drafter.config.feature_size, generator=generator, dtype=torch.float64)


def simulate(drafter: Eagle3Drafter, ids: Tensor, taps: Tensor, depths: int) -> list[Tensor]:
    """One anchor, the last position of `taps`, drafted token by token; every pass runs everything so far again."""
    embeds, features = drafter.embed_tokens(ids), drafter.combine(taps)
    hidden = []
    for rows in range(len(taps), len(taps) + depths):
        stream = drafter.stream(embeds[:rows], features, torch.arange(rows), causal_attend([rows]))
        hidden.append(drafter.norm(stream[-1]))
        features = torch.cat((features, stream[-1:]))
    return hidden


def every_anchor(drafter: Eagle3Drafter, ids: Tensor, taps: Tensor) -> dict[tuple[int, int], Tensor]:
    """Hidden state of every row inside its document, by (anchor, depth)."""
    found, start = {}, 0
    for length in LENGTHS:
        end = start + length
        for anchor in range(start, end):
            depths = min(K, end - anchor)
            for d, h in enumerate(simulate(drafter, ids[start:end], taps[start : anchor + 1], depths)):
                found[anchor, d] = h
        start = end
    return found


@pytest.mark.parametrize("changes", [{}, {"norm_before_fc": True, "norm_before_residual": True, "num_layers": 1}])
def test_equals_drafting_token_by_token_with_gradients(changes: dict[str, object]):
    drafter = tiny_eagle3(**changes)
    doc, ids, taps = pack(drafter)
    expected = every_anchor(drafter, ids, taps)
    hidden = ttt_hidden(drafter, ids, taps, rows_of(doc), K, "reference")
    index = torch.tensor([d * len(doc) + a for a, d in expected])
    rows = torch.stack(list(expected.values()))
    torch.testing.assert_close(hidden[index], rows, rtol=0, atol=1e-12)

    weights = torch.randn(rows.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (rows * weights).sum().backward()
    by_hand = {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}
    drafter.zero_grad()
    hidden.backward(torch.zeros_like(hidden).index_put((index,), weights))  # zero on rows without meaning
    assert set(by_hand) == {name for name, _ in drafter.named_parameters() if name != "lm_head.weight"}
    for name, gradient in by_hand.items():
        torch.testing.assert_close(drafter.get_parameter(name).grad, gradient, rtol=0, atol=1e-10)


def test_checkpointed_activations_change_nothing():
    drafter = tiny_eagle3()
    doc, ids, taps = pack(drafter)
    gradients = []
    for drafter.checkpoint_activations in (False, True):
        drafter.zero_grad()
        hidden = ttt_hidden(drafter, ids, taps, rows_of(doc), K, "reference")
        hidden.square().sum().backward()
        gradients.append([p.grad.clone() for p in drafter.parameters() if p.grad is not None])
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=1e-12)


def test_gradients_flow_through_the_chain():
    """The loss of depth 3 alone reaches the taps of its anchor, through three streams fed back."""
    drafter = tiny_eagle3()
    doc, ids, taps = pack(drafter)
    taps.requires_grad_()
    hidden = ttt_hidden(drafter, ids, taps, rows_of(doc), K, "reference")
    hidden[3 * len(doc) + 2].sum().backward()
    reached = taps.grad.abs().amax(dim=1) > 0
    assert reached.tolist() == [True] * 3 + [False] * (len(doc) - 3)


def test_more_depths_than_positions():
    drafter = tiny_eagle3()
    ids, taps = torch.tensor([5, 6]), torch.randn(2, drafter.config.feature_size, dtype=torch.float64)
    hidden = ttt_hidden(drafter, ids, taps, rows_of(np.zeros(2, np.int64)), 5, "reference")
    assert hidden.shape == (10, 16)
    hidden.sum().backward()
    assert all(p.grad.isfinite().all() for p in drafter.parameters() if p.grad is not None)


def test_flex_is_refused():
    drafter = tiny_eagle3()
    doc, ids, taps = pack(drafter)
    with pytest.raises(PeagleError, match="flex"):
        ttt_hidden(drafter, ids, taps, rows_of(doc), K, "flex")


@pytest.mark.parametrize(("max_tokens", "window"), [(1, None), (6, None), (6, K + 1)])
def test_equals_the_passes_of_the_engine(max_tokens: int, window: int | None):
    """Teacher-forced with the engine's own drafts, the unroll must give the hidden states the engine drafted from."""
    parts, drafter = tiny_parts(torch.float64, parallel=False)
    if window is not None:
        types = ("full_attention", "sliding_attention")
        windowed = Eagle3Drafter(replace(drafter.config, layer_types=types, sliding_window=window)).double()
        windowed.load_state_dict(drafter.state_dict())
        drafter = windowed.requires_grad_(False)
    llm = LLM.from_parts(parts, drafter, K, EngineConfig(block_size=4, max_num_seqs=1))
    target = parts.model
    seen, decided = [], []
    logits, advance = drafter.logits, llm.core._advance
    drafter.logits = lambda hidden: (seen.append(hidden), logits(hidden))[1]

    def note(request: Request, line: list[int], num_drafts: int | None, now: float) -> None:
        decided.append(line[: line[-1] + 1])
        advance(request, line, num_drafts, now)

    llm.core._advance = note
    for prompt in random_prompts(4, seed=7):
        seen.clear(), decided.clear()
        llm.generate([prompt], SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))
        sampled = [token for tokens in decided for token in tokens]
        tokens = torch.tensor([*prompt, *sampled, *drafts_of(llm)[0].tolist()])
        known = len(prompt) + len(sampled) - 1  # positions with taps, the last one the anchor
        _, taps = target(tokens[:known], torch.arange(known), causal_attend([known]), drafter.config.tap_ids)
        taps = torch.cat((taps, torch.zeros(K - 1, taps.shape[1], dtype=taps.dtype)))
        doc = np.zeros(len(taps), np.int64)
        hidden = ttt_hidden(drafter, tokens[1 : len(taps) + 1], taps, rows_of(doc), K, "reference")
        for d, drafted_from in enumerate(seen[-K:]):
            torch.testing.assert_close(hidden[d * len(taps) + known - 1], drafted_from[0], rtol=0, atol=1e-10)
