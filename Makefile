# Each target does its own set-up in .venv, once. Needs Python 3.11 or newer and make; works in any folder, also one with spaces.
# PYTHON=... chooses the interpreter, VENV=... another place for the environment, TORCH=no leaves PyTorch and its tests out.

VENV ?= .venv
PY = "$(VENV)/bin/python"
RUN = PYTHONPATH=src $(PY)
TESTS ?= tests

.PHONY: demo test lint types docs bench clean help

demo: $(VENV)/.ready
	@$(RUN) -m miraccl perf all_reduce --ranks 4 --sizes 256K,4M,16M

test: $(VENV)/.ready-torch
	@$(RUN) -m pytest -q $(TESTS)

lint: $(VENV)/.ready-dev
	@$(PY) -m ruff check .

types: $(VENV)/.ready-dev
	@$(PY) -m mypy

docs: $(VENV)/.ready
	@$(RUN) .ci/update-docs

bench: $(VENV)/.ready
	@$(RUN) bench/call_overhead.py
	@$(RUN) bench/startup.py

help:
	@echo "make demo   all_reduce on 4 ranks, every element checked"
	@echo "make test   the tests"
	@echo "make lint   ruff;  make types   mypy"
	@echo "make docs   what is generated in docs/"
	@echo "make bench  the quick measurements of bench/"
	@echo "make clean  remove the environment"

# The package is installed as a link to src, for the command .venv/bin/miraccl; the targets above do without.
$(VENV)/.ready: pyproject.toml
	@python=`sh .ci/find-python $(PYTHON)` && "$$python" -m venv "$(VENV)"
	@echo "installing what miraccl needs into $(VENV) (once)"
	@$(PY) -m pip install -q --disable-pip-version-check -e .
	@touch "$@"

$(VENV)/.ready-dev: $(VENV)/.ready
	@echo "installing what the tests need into $(VENV) (once)"
	@$(PY) -m pip install -q --disable-pip-version-check -e ".[dev,plot]"
	@touch "$@"

# PyTorch is wanted by its tests alone, which are skipped where it cannot be installed.
$(VENV)/.ready-torch: $(VENV)/.ready-dev .ci/install-torch
	@echo "installing PyTorch for its tests into $(VENV) (once)"
	@$(PY) .ci/install-torch
	@touch "$@"

clean:
	rm -rf "$(VENV)"
