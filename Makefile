# Each target does its own set-up in .venv, once. Needs Python 3.11 or newer and make; works in any folder, also one with spaces.
# PYTHON=... chooses the interpreter, VENV=... another place for the environment, TORCH=no leaves PyTorch and its tests out.

VENV ?= .venv
PY = "$(VENV)/bin/python"
RUN = PYTHONPATH=src $(PY)
TESTS ?= tests

.PHONY: demo test lint types docs bench clean help

demo: $(VENV)/.ready
	@$(RUN) -m miraccl perf all_reduce --ranks 4 --sizes 256K,4M,16M

test: $(VENV)/.ready-test
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

# PyTorch and CUDA's compiler are wanted by their tests alone, which are skipped where these cannot be installed.
# NVRTC 12.9 is the last that compiles for sm_70, and compiles for sm_100, too.
$(VENV)/.ready-test: $(VENV)/.ready-dev .ci/install-torch
	@echo "installing PyTorch and CUDA's compiler for their tests into $(VENV) (once)"
	@$(PY) .ci/install-torch
	@$(PY) -m pip install -q --disable-pip-version-check "cuda-bindings==12.9.*" "nvidia-cuda-nvrtc-cu12==12.9.*" 2>/dev/null \
		|| echo "note: without NVRTC, whose tests are skipped: pip cannot install it"
	@touch "$@"

clean:
	rm -rf "$(VENV)"
