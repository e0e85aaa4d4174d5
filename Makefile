# make train: set everything up on a fresh machine and run the main job.  make test: all checks.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CODE := src tests examples $(wildcard benchmarks)

.PHONY: train setup test lint clean

# A byte-level transformer on rehearsed devices of 8, 4, 2 and 2 GFLOP/s.
train: setup
	$(BIN)/evener train examples/text.py --steps 120 --rehearse examples/fleets/8-4-2-2.json

setup: $(STAMP)

# The constraints file keeps torch at the CPU build; for GPUs: make setup CONSTRAINTS=
CONSTRAINTS ?= constraints.txt
$(STAMP): pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(addprefix --constraint ,$(CONSTRAINTS)) --editable '.[dev]'
	touch $@

# Side by side as far as tests allow it (tests/conftest.py); bytecode is kept, as tests start many processes.
test: lint
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n logical --maxprocesses 4

lint: setup
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist runs src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
