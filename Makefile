# Each target does its own set-up in .venv, once. Needs Python 3.11 or newer and make; paths may contain spaces.
# PYTHON=... chooses the interpreter, VENV=... another folder for the environment, TORCH=no leaves out PyTorch and its
# tests, TESTS=... selects the tests to run (default: all).

VENV ?= .venv
PY = "$(VENV)/bin/python"
RUN = PYTHONPATH=src $(PY)
TESTS ?=
ENGINES ?= .venv-engines
ENGINE_TESTS ?= tests/ray tests/mpi tests/launchers tests/interop tests/examples tests/torch/test_backend.py

.PHONY: demo test test-engines test-guest lint types language structure docs diagrams site bench clean help

demo: $(VENV)/.ready
	@$(RUN) -m miraccl perf all_reduce --ranks 4 --sizes 256K,4M,16M

test: $(VENV)/.ready-test
	@PYTHONPATH=src sh .ci/test $(PY) $(TESTS)

# In an environment of its own, so that `make test` needs no engine. docs/guide/mpi.md says which mpirun is run.
test-engines: $(ENGINES)/.ready-engines
	@here=`cd "$(ENGINES)" && pwd` && PYTHONPATH=src PATH="$$here/bin:$$PATH" \
		MIRACCL_TEST_MPIRUN="$${MIRACCL_TEST_MPIRUN:-`ls "$$here/bin/mpirun" "$$here/mpich/bin/mpirun" 2>/dev/null | paste -sd: -`}" \
		TEST_SLOW=1 "$$here/bin/python" -m pytest -q $(ENGINE_TESTS)

# On real Soft-RoCE, in a guest that the first run builds from Debian's kernel source (as root, by apt-get).
# GUEST=qemu takes Debian's kernel as it is, which is slower where the processor cannot run guests.
GUEST ?= uml
test-guest: $(VENV)/.ready-test
	@echo "tests on Soft-RoCE: the first run prepares a guest (uml: 10 to 20 minutes of two cores, qemu: 1), others take 3 to 10 minutes"
	@start=`date +%s`; tests/guest/vm/run-in-vm --engine $(GUEST) -t 1800 -l 'rdma 2 2' -e PYTHONPATH=src \
		-e PYTHONDONTWRITEBYTECODE=1 -- $(PY) -m pytest -q -p no:cacheprovider tests/guest $(TESTS); \
		code=$$?; echo "took $$((`date +%s` - start)) s"; exit $$code

lint: $(VENV)/.ready-dev
	@$(PY) -m ruff check .

types: $(VENV)/.ready-dev
	@$(PY) -m mypy

# Aims, not gates: each prints the figures at commit ab73fdd beside the current ones. LIST=yes lists the places.
language: $(VENV)/.ready
	@$(RUN) .ci/codecheck language $(if $(LIST),--list)

structure: $(VENV)/.ready
	@$(RUN) .ci/codecheck structure $(if $(LIST),--list)

docs: $(VENV)/.ready
	@$(RUN) .ci/update-docs

diagrams: $(VENV)/.ready
	@$(RUN) .ci/update-docs --diagrams

site: $(VENV)/.ready-docs
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo "built: site/index.html"

bench: $(VENV)/.ready
	@$(RUN) bench/call_overhead.py
	@$(RUN) bench/startup.py

help:
	@echo "make demo   all_reduce on 4 ranks, every element checked"
	@echo "make test   the tests"
	@echo "make test-engines  the tests with Ray, Open MPI, MPICH, mpi4py and JAX, which it installs in $(ENGINES)"
	@echo "make test-guest  the tests on Soft-RoCE, in a virtual machine that it prepares (Debian)"
	@echo "make lint   ruff;  make types   mypy"
	@echo "make language, make structure   figures of the code and their aims; LIST=yes lists the places"
	@echo "make diagrams  redraw the diagrams of docs/design from the code"
	@echo "make docs   regenerate the generated pages and blocks in docs/"
	@echo "make site   build the documentation as a site in site/"
	@echo "make bench  the quick measurements of bench/"
	@echo "make clean  remove the environment"

# An editable install, for the command .venv/bin/miraccl; the targets above use PYTHONPATH=src.
$(VENV)/.ready: pyproject.toml
	@python=`sh .ci/find-python $(PYTHON)` && "$$python" -m venv "$(VENV)"
	@echo "installing the dependencies of miraccl into $(VENV) (once)"
	@$(PY) -m pip install -q --disable-pip-version-check -e .
	@touch "$@"

$(VENV)/.ready-dev: $(VENV)/.ready
	@echo "installing the dependencies of the tests into $(VENV) (once)"
	@$(PY) -m pip install -q --disable-pip-version-check -e ".[dev,plot]"
	@touch "$@"

$(VENV)/.ready-docs: $(VENV)/.ready
	@echo "installing MkDocs into $(VENV) (once)"
	@$(PY) -m pip install -q --disable-pip-version-check -e ".[docs]"
	@touch "$@"

# Only their own tests need PyTorch and NVRTC; these are skipped if they cannot be installed.
# NVRTC 12.9 is the last one that compiles for sm_70; it also compiles for sm_100.
$(VENV)/.ready-test: $(VENV)/.ready-dev .ci/install-torch
	@echo "installing PyTorch and CUDA's compiler for their tests into $(VENV) (once)"
	@$(PY) .ci/install-torch
	@$(PY) -m pip install -q --disable-pip-version-check "cuda-bindings==12.9.*" "nvidia-cuda-nvrtc-cu12==12.9.*" 2>/dev/null \
		|| echo "note: pip cannot install NVRTC; its tests are skipped"
	@touch "$@"

$(ENGINES)/.ready-engines: pyproject.toml .ci/install-engines .ci/install-torch
	@$(MAKE) --no-print-directory VENV="$(ENGINES)" "$(ENGINES)/.ready-test"
	@echo "installing Ray, MPI and JAX for their tests into $(ENGINES) (once)"
	@"$(ENGINES)/bin/python" .ci/install-engines
	@touch "$@"

clean:
	rm -rf "$(VENV)" "$(ENGINES)"
