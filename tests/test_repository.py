"""The repository's own habits: line budget, README tables, commands in documents that parse, no local paths."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from benchmarks.acceptance import AcceptanceRow
from peagle.bench.report import read_result, write_result
from peagle.cli import app
from peagle.help import EXAMPLES

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import line_budget  # noqa: E402  # scripts/ is no package
import readme_tables  # noqa: E402

DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "heads", "benchmarks/data", "recipes/data")


def documents():
    for name in DOCUMENTS:
        path = ROOT / name
        yield from sorted(path.rglob("*.md")) if path.is_dir() else [path]


def repository_files():
    """Files git tracks or would track; all files below the known folders where there is no git."""
    listed = subprocess.run(
        ("git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"), capture_output=True
    )
    if listed.returncode == 0:
        return [path for name in listed.stdout.decode().split("\0") if name and (path := ROOT / name).is_file()]
    folders = ("peagle", "tests", "scripts", "docs", "benchmarks", "heads", "recipes")
    return [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]


def test_line_budget():
    summary, over = line_budget.check(ROOT)
    assert not over, summary


def test_line_budget_notices(tmp_path):
    (tmp_path / "peagle").mkdir()
    long_function = "def f() -> None:\n" + "    pass\n" * 60
    (tmp_path / "peagle" / "a.py").write_text(long_function + "x = 1\n" * 450)
    _, over = line_budget.check(tmp_path)
    assert len(over) == 2
    assert "511 lines" in over[0]
    assert "61 lines at the 90th percentile" in over[1]
    assert line_budget.percentile_90(list(range(1, 11))) == 9


def test_readme_tables_are_up_to_date():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme_tables.main(["--check"]) == 0, "run `make tables`"
    assert len(readme_tables.BLOCK.findall(text)) >= 4


def test_measured_figures_stand_in_filled_tables_only():
    for path in (ROOT / "README.md", ROOT / "docs" / "results.md", *ROOT.glob("heads/*/README.md")):
        by_hand = readme_tables.BLOCK.sub("", path.read_text(encoding="utf-8"))
        rows = [line for line in by_hand.splitlines() if line.startswith("|") and re.search(r"\d\.\d", line)]
        assert rows == [], f"{path}: put the table between results marks"


def test_a_stale_page_fails_the_check(tmp_path, monkeypatch, capsys):
    (tmp_path / "README.md").write_text("<!-- results:acceptance-a -->\nold\n<!-- /results -->\n")
    monkeypatch.setattr(readme_tables, "ROOT", tmp_path)
    assert readme_tables.main(["--check"]) == 1
    assert "README.md" in capsys.readouterr().out
    assert readme_tables.main([]) == 0
    assert readme_tables.main(["--check"]) == 0


def test_readme_tables_notice_a_new_result(tmp_path):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    name = "acceptance-smollm2-135m"
    row = AcceptanceRow(
        suite="made_up",
        num_speculative_tokens=3,
        temperature=0.0,
        acceptance_length=2.0,
        acceptance_length_without_loops=2.0,
        accepted_share_per_position=(1.0,),
        accepted_share_per_position_without_loops=(1.0,),
        looping_token_share=0.0,
        prompts=1,
        rounds=1,
        tokens=1,
    )
    write_result(tmp_path / f"{name}.json", name, {}, {"rows": [row]})
    filled = readme_tables.fill(text, tmp_path)
    assert filled != text
    assert "made_up" in filled
    assert readme_tables.fill(filled, tmp_path) == filled


def test_the_card_beside_a_head_is_a_committed_result():
    results = {p.read_text(encoding="utf-8") for p in (ROOT / "benchmarks" / "results").glob("*.json")}
    for card in ROOT.glob("heads/*/acceptance.json"):
        assert card.read_text(encoding="utf-8") in results, f"{card}: copy a file of benchmarks/results"


def test_every_result_is_readable():
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        assert read_result(path)["name"] == path.stem


def commands_in_documents():
    blocks = [block for path in documents() for block in re.findall(r"```\w*\n(.*?)```", path.read_text(), re.DOTALL)]
    scripts = [path.read_text().replace("$ROOT", str(ROOT)) for path in (ROOT / "recipes").glob("*.sh")]
    recipes = [re.sub(r"\$\w+", "1", text) for text in scripts]
    lines = [line.strip() for block in blocks + recipes for line in block.replace("\\\n", " ").splitlines()]
    lines += [line for examples in EXAMPLES.values() for line in examples.splitlines()]
    return sorted({line.split("  #")[0].strip() for line in lines if line.startswith("peagle ")})


@pytest.mark.parametrize("line", commands_in_documents())
def test_commands_in_documents_parse(line, monkeypatch):
    monkeypatch.chdir(ROOT)  # where the files that commands name are
    verb, *arguments = shlex.split(line)[1:]
    command = typer.main.get_command(app).commands[verb]
    while hasattr(command, "commands"):  # a group of verbs
        verb, *arguments = arguments
        command = command.commands[verb]
    assert command.make_context(verb, arguments).params


def test_recipes_are_executable_and_parse_as_shell():
    for path in (ROOT / "recipes").glob("*.sh"):
        assert os.access(path, os.X_OK)
        assert subprocess.run(("bash", "-n", str(path))).returncode == 0


def test_the_prompt_sample_is_what_its_readme_says():
    folder = ROOT / "recipes" / "data"
    rows = [json.loads(line) for line in (folder / "train_prompts_sample.jsonl").read_text().splitlines()]
    table = re.findall(
        r"^\| `(\w+)(\*?)` \| .+? \| ([\w.-]+) \| (\d+) \|", (folder / "README.md").read_text(), re.MULTILINE
    )
    assert len(rows) == sum(int(count) for *_, count in table) == len({row["id"] for row in rows})
    for source, star, licence, count in table:
        drawn = [row for row in rows if row["source"] == source or (star and row["source"].startswith(source))]
        assert len(drawn) == int(count), source
        assert {row["license"] for row in drawn} == {licence}


def test_links_in_documents_lead_somewhere():
    for path in documents():
        for target in re.findall(r"\]\((?!https?://)([^)#]+)", path.read_text(encoding="utf-8")):
            is_result = target.startswith("benchmarks/results/")
            assert is_result or (path.parent / target).exists(), f"{path}: {target}"


def test_no_local_paths_or_registry_hosts():
    # Spelled in parts, so that this file does not find itself.
    words = ("/wo" + "rk/", "/ro" + "ot/", "/opt/" + "wheels", "bash_" + "jobs", r"\bleas" + r"e\b", "pypi" + r"\.")
    pattern = re.compile("|".join(words))
    for path in repository_files():
        if path.suffix in (".safetensors", ".png") or "benchmarks/data" in path.as_posix():
            continue
        text = path.read_text(encoding="utf-8")
        found = pattern.search(text)
        assert found is None, f"{path}: {found and found[0]}"


def test_ci_script_runs_the_tests():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text()


def test_licence_is_whole():
    text = (ROOT / "LICENSE").read_text()
    assert text.lstrip().startswith("Apache License")
    assert "END OF TERMS AND CONDITIONS" in text
