"""Triton decides at import whether it interprets, so the CPU tests of a kernel run in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # this is that process


def run_interpreted(file: str) -> None:
    """Run the tests of `file` with "interpreted" in their names in Triton's interpreter; all of them must pass."""
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "interpreted", file)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "skipped" not in result.stdout
