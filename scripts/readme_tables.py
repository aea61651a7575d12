"""Fill the tables of the README, the model cards and the docs from benchmarks/results/*.json.

A table stands between `<!-- results:NAME -->` and `<!-- /results -->`.

python -m scripts.readme_tables          # rewrite the pages
python -m scripts.readme_tables --check  # exit status 1 if one of them is out of date
"""

import re
import sys
from pathlib import Path
from typing import Any

from benchmarks.tables import render_from
from peagle.bench.report import read_result

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"(<!-- results:(?P<name>[\w.-]+) -->\n).*?(<!-- /results -->)", re.DOTALL)


def fill(readme: str, results: Path, to_root: str = "") -> str:
    """A page's text with every marked block rendered anew from the files in `results`; `to_root` leads links there."""

    def read(name: str) -> dict[str, Any] | None:
        path = results / f"{name}.json"
        return read_result(path) if path.exists() else None

    def block(match: re.Match[str]) -> str:
        body = render_from(match["name"], read)
        return f"{match[1]}{body.replace('](benchmarks/', f']({to_root}benchmarks/')}\n{match[3]}"

    return BLOCK.sub(block, readme)


def main(arguments: list[str]) -> int:
    stale = []
    for path in (ROOT / "README.md", *sorted(ROOT.glob("heads/*/README.md")), *sorted(ROOT.glob("docs/*.md"))):
        current = path.read_text(encoding="utf-8")
        to_root = "../" * (len(path.relative_to(ROOT).parts) - 1)
        wanted = fill(current, ROOT / "benchmarks" / "results", to_root)
        if wanted != current:
            stale.append(str(path.relative_to(ROOT)))
            if arguments != ["--check"]:
                path.write_text(wanted, encoding="utf-8")
    if arguments == ["--check"]:
        print(f"tables out of date, run scripts.readme_tables: {', '.join(stale)}" if stale else "tables up to date")
        return bool(stale)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
