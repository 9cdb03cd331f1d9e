# Everything here works from a bare clone: the first target that needs it makes .venv and installs into it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
# A CPU build of torch brings no Triton. The GPU kernels' logic is tested all the same, under Triton's interpreter.
TRITON := triton==3.6.0

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format docs bench-comm clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

setup: $(INSTALLED)  ## make .venv and install moefleet and its tools

demo: $(INSTALLED)  ## show expert parallelism on this machine
	@$(BIN)/moefleet demo

test: $(INSTALLED)  ## run the tests
	@$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

lint: $(INSTALLED)  ## check style, formatting and types
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

format: $(INSTALLED)  ## fix style and formatting
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

docs: $(INSTALLED)  ## build the documentation as a site, in site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

bench-comm: $(INSTALLED)  ## time dispatch and combine of every transport that runs here
	@$(BIN)/moefleet bench comm --world 4 --tokens 128 --hidden 2048 --experts 64 --topk 8

clean:  ## remove .venv, caches and build outputs
	@rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find src tests examples docs -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# torch comes first and pinned, so that nothing else pulls in another build of it.
$(INSTALLED): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
	  echo "moefleet: no '$(PYTHON)' here. Install Python 3.10 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "moefleet: $$($(PYTHON) --version 2>&1) is too old, 3.10 or newer is needed. Name another: make PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || out=$$($(PYTHON) -m venv $(VENV) 2>&1) || { rm -rf $(VENV); echo "$$out" >&2; \
	  echo "moefleet: $(PYTHON) cannot make a virtual environment. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip >/dev/null 2>&1 || { \
	  echo "moefleet: $(VENV) has no pip and none can be put there. Remove it and try again: rm -r $(VENV)" >&2; exit 1; }
	@echo "moefleet: installing into $(VENV) (the first time this downloads PyTorch: some minutes)"
	@$(PIP) install --quiet --upgrade pip
	@$(PIP) install --quiet "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	@$(PIP) install --quiet --editable ".[dev]" -c constraints.txt
	@test "$$(uname -s)" != Linux || $(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) install --quiet "$(TRITON)"
	@touch $@
