"""Tables on a terminal: whatever its width, nothing of them is cut."""

import io

import pytest
from rich.console import Console

from peagle.bench.eval_tables import print_tables
from peagle.bench.markdown import Block, print_block


def printed(show, width):
    said = io.StringIO()
    show(Console(file=said, width=width))
    return said.getvalue()


def acceptance(suite, temperature):
    shares = [0.75, 0.54, 0.4, 0.29, 0.21, 0.15, 0.11]
    return {
        "suite": suite, "temperature": temperature, "num_speculative_tokens": 7, "acceptance_length": 3.45,
        "acceptance_length_interval": [3.3, 3.6], "acceptance_length_without_loops": 3.21,
        "accepted_share_per_position": shares, "conditional_share_per_position": shares, "prompts": 80,
        "tokens": 17_145,
    }  # fmt: skip


def test_an_evaluation_fits_80_columns_with_whole_names_and_figures():
    rows = [acceptance(suite, temperature) for suite in ("mt_bench", "humaneval") for temperature in (0.0, 0.7)]
    text = printed(lambda to: print_tables(to, {"results": {"rows": rows}, "settings": {}}), 80)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert [text.count(word) for word in ("mt_bench", "humaneval", "17,145", "3.45", "[3.30,", "0.11")] == [
        2, 2, 4, 4, 4, 8,
    ]  # fmt: skip


@pytest.mark.parametrize("width", [10, 12, 25, 60])
def test_in_a_narrow_table_every_character_is_there(width):
    names = ["latency_ms.ttft.p50", "latency_ms.ttft.p95", "a name of words"]
    block = Block("", ["[b]figure", "a", ""], [[name, f"{1000 * n:,}", ""] for n, name in enumerate(names)])
    text = printed(lambda to: print_block(to, block), width)
    assert max(map(len, text.splitlines())) <= width
    cells = [cell for line in (block.header, *block.rows) for cell in line]
    assert sorted("".join(text.replace("─", "").split())) == sorted("".join(cells).replace(" ", ""))


def test_a_wide_table_wraps_between_words_before_it_breaks_one():
    block = Block("", ["figure", "95 %"], [["  latency_ms.ttft.mean", "[+7.078, +7.26]"]])
    text = printed(lambda to: print_block(to, block), 36)
    assert "   latency_ms.ttft.mean  " in text
    assert "[+7.078," in text
    assert "\n" in text[text.index("[+7.078,") : text.index("+7.26]")]
