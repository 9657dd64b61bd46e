# Each target does its own set-up: a fresh machine needs Python 3.11+ and make, nothing else.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Small networks run faster on one thread than on two (see docs/performance.md).
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint types docs bench format clean

demo: $(VENV)/.demo
	$(BIN)/robboost demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.dev
	$(BIN)/mkdocs build --strict

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/weights.py --quick
	$(BIN)/python benchmarks/bounds.py --quick

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist site robboost-demo .pytest_cache .mypy_cache .ruff_cache

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("RobBoost needs Python 3.11 or newer, found " + sys.version.split()[0] + ": set PYTHON=") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@ $(VENV)/.demo
