# Each target does its own set-up in .venv, once. Needs Python 3.11 or newer and make; works in any folder, also one with spaces.
# PYTHON=... chooses the interpreter, VENV=... another place for the environment, TORCH=no leaves PyTorch and its tests out, TESTS=... are
# the tests to run, instead of all.

VENV ?= .venv
PY = "$(VENV)/bin/python"
RUN = PYTHONPATH=src $(PY)
TESTS ?=
ENGINES ?= .venv-engines
ENGINE_TESTS ?= tests/ray tests/mpi tests/launchers tests/interop tests/examples tests/torch/test_backend.py

.PHONY: demo test test-engines lint types docs bench clean help

demo: $(VENV)/.ready
	@$(RUN) -m miraccl perf all_reduce --ranks 4 --sizes 256K,4M,16M

test: $(VENV)/.ready-test
	@PYTHONPATH=src sh .ci/test $(PY) $(TESTS)

# In an environment of its own, so that `make test` needs no engine. Which mpirun is run: docs/mpi.md.
test-engines: $(ENGINES)/.ready-engines
	@here=`cd "$(ENGINES)" && pwd` && PYTHONPATH=src PATH="$$here/bin:$$PATH" \
		MIRACCL_TEST_MPIRUN="$${MIRACCL_TEST_MPIRUN:-`ls "$$here/bin/mpirun" "$$here/mpich/bin/mpirun" 2>/dev/null | paste -sd: -`}" \
		TEST_SLOW=1 "$$here/bin/python" -m pytest -q $(ENGINE_TESTS)

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
	@echo "make test-engines  those with Ray, Open MPI, MPICH, mpi4py and JAX, which it installs in $(ENGINES)"
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

$(ENGINES)/.ready-engines: pyproject.toml .ci/install-engines .ci/install-torch
	@$(MAKE) --no-print-directory VENV="$(ENGINES)" "$(ENGINES)/.ready-test"
	@echo "installing Ray, MPI and JAX for their tests into $(ENGINES) (once)"
	@"$(ENGINES)/bin/python" .ci/install-engines
	@touch "$@"

clean:
	rm -rf "$(VENV)" "$(ENGINES)"
