# make demo   sets up and trains a small model, here and now, in under three minutes
# make test   sets up, then lint, types and tests
.PHONY: setup sandbox demo test test-all lint types unit format clean

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
# Each test process gets one thread: two cores are better used by two workers.
WORKERS ?= 2

setup: $(STAMP) sandbox

# Model-written code runs in bubblewrap. Debian's root gets it here; elsewhere tests that need it are skipped and say why.
APT := apt-get install -y -qq bubblewrap
sandbox:
	@command -v bwrap >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  { $(APT) >/dev/null 2>&1 || { apt-get update -qq >/dev/null 2>&1; $(APT) >/dev/null 2>&1; }; } } || \
	  echo "bubblewrap is missing and cannot be installed from here: tests of model-written code will be skipped"

# torch is named first and exactly: the constraints file decides the rest.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(STAMP)

demo: setup
	$(BIN)/rloom demo

test: lint types unit

test-all: lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist=worksteal

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

unit: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist=worksteal -m "not slow"

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
