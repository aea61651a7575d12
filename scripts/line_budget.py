"""Hold the code to its size: file <= 500 lines, package <= 35,500 lines, function <= 45 lines at the 90th percentile.

python scripts/line_budget.py            # one line of totals, or the offenders and exit status 1
"""

import ast
import math
import sys
from pathlib import Path

FILE_LINES = 500
PACKAGE_LINES = 35_500
FUNCTION_LINES_P90 = 45
ROOT = Path(__file__).resolve().parents[1]


def function_lengths(source: str) -> list[int]:
    """Lines of every function in a file, from `def` to its last line."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    return [(node.end_lineno or node.lineno) - node.lineno + 1 for node in nodes]


def percentile_90(values: list[int]) -> int:
    """Nearest-rank 90th percentile; 0 for none."""
    return sorted(values)[math.ceil(0.9 * len(values)) - 1] if values else 0


def check(root: Path) -> tuple[str, list[str]]:
    """(one line of totals, what is over budget) for a checkout at `root`."""
    sources = {
        path.relative_to(root): path.read_text(encoding="utf-8")
        for folder in ("peagle", "tests", "scripts", "benchmarks")
        for path in sorted((root / folder).rglob("*.py"))
    }
    lines = {path: text.count("\n") for path, text in sources.items()}
    package = {path: text for path, text in sources.items() if path.parts[0] == "peagle"}
    total = sum(lines[path] for path in package)
    p90 = percentile_90([length for text in package.values() for length in function_lengths(text)])

    over = [f"{path}: {count} lines, at most {FILE_LINES}" for path, count in lines.items() if count > FILE_LINES]
    if total > PACKAGE_LINES:
        over.append(f"peagle/: {total} lines, at most {PACKAGE_LINES}")
    if p90 > FUNCTION_LINES_P90:
        over.append(f"peagle/: functions have {p90} lines at the 90th percentile, at most {FUNCTION_LINES_P90}")
    summary = f"line budget: peagle/ {total} of {PACKAGE_LINES} lines, functions p90 {p90} of {FUNCTION_LINES_P90}"
    return summary, over


def main() -> int:
    summary, over = check(ROOT)
    print(summary)
    for line in over:
        print(f"over budget: {line}", file=sys.stderr)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
