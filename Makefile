# A newcomer needs `make demo` and `make test`; CONTRIBUTING.md says what the others are for.

PYTHON ?= python3
VENV := .venv
ORACLE := .venv-oracle
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

.NOTPARALLEL:
.PHONY: help demo test lint check mutate test-rknn test-train test-arm oracle fixtures clean

help:
	@echo "make demo      export SmolLM2-135M, answer a question and digest a log with it"
	@echo "make test      run the tests"
	@echo "make lint      ruff, format and types"
	@echo "make check     make lint, then make test"
	@echo "make test-rknn compile drafts with Rockchip's toolkit and simulate them (625 MB)"
	@echo "make test-train train and resume small drafts with torch (large downloads)"
	@echo "make test-arm  run the runtime on a board's CPU, emulated by qemu-user"
	@echo "make mutate    whether the tests notice what is taken out of the NPU path (10 to 20 minutes)"
	@echo "make oracle    compare with torch, transformers and optimum (large downloads)"
	@echo "make fixtures  make the stored logits of tests/data anew"
	@echo "make clean     remove environments and caches of this folder"

demo: $(VENV)/.demo
	@$(VENV)/bin/headrace demo

test: $(VENV)/.dev
	$(VENV)/bin/pytest

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

check: lint test

mutate: $(VENV)/.dev
	$(VENV)/bin/python tests/mutate.py

test-rknn: $(VENV)/.dev
	$(VENV)/bin/headrace rknn-env
	$(VENV)/bin/pytest -o addopts="--import-mode=importlib --strict-markers -ra" tests/rknn

test-train: $(ORACLE)/.oracle
	$(ORACLE)/bin/pytest -o addopts="--import-mode=importlib --strict-markers -ra" tests/train

test-arm: $(VENV)/.dev
	@$(VENV)/bin/python tests/aarch64/debian_tree.py
	$(VENV)/bin/pytest -o addopts="--import-mode=importlib --strict-markers -ra" tests/aarch64

oracle: $(ORACLE)/.oracle
	$(ORACLE)/bin/pytest -o addopts="--import-mode=importlib --strict-markers -ra" tests/oracle

fixtures: $(ORACLE)/.oracle
	$(ORACLE)/bin/python tests/oracle/make_fixtures.py

clean:
	rm -rf $(VENV) $(ORACLE) build dist *.egg-info
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps, so that a second run installs nothing. They are written last: an install that was cut
# short is done again.

$(VENV)/.demo: $(VENV)/.made pyproject.toml
	@echo "Installing headrace and its exporter into $(VENV)"
	@$(VENV)/bin/python $(PIP_INSTALL) -e '.[export]'
	@touch $@

$(VENV)/.dev: $(VENV)/.made pyproject.toml
	@echo "Installing headrace and the tools of its tests into $(VENV)"
	@$(VENV)/bin/python $(PIP_INSTALL) -e '.[dev]'
	@touch $(VENV)/.demo $@

# Plain torch would be the newest release, on x86-64 with several GB of CUDA.
$(ORACLE)/.oracle: $(ORACLE)/.made pyproject.toml
	@echo "Installing headrace, torch and transformers into $(ORACLE); this takes a while"
	@$(ORACLE)/bin/python $(PIP_INSTALL) torch==2.13.0 -e '.[oracle]'
	@touch $@

%/.made:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { \
	  echo "headrace needs Python 3.11 to 3.13, and $(PYTHON) is not one of them;" \
	    "name another with PYTHON=, e.g. make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments;" \
	    "on Debian and Ubuntu: sudo apt install python3-venv" >&2; exit 1; }
	@echo "Making $* with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $*
	@touch $@
