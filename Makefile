# `make demo` runs the demo, and `make test` the tests. The first of them creates .venv.
# This file works with GNU make 3.81 (macOS) and later.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV := $(shell command -v uv 2>/dev/null)

# On Linux the default build of torch has gigabytes of CUDA. The CPU build has a local version, which needs an index of
# CPU builds or a local wheel. macOS has one small build.
TORCH := torch==$(shell sed -n 's/^torch==//p' constraints.txt)$(if $(filter Linux,$(shell uname -s)),+cpu)

# Quiet twice, so that pip prints only errors. With --no-compile Python compiles what it imports, not all of it.
PIP_FLAGS := --quiet --quiet --disable-pip-version-check

ifneq ($(UV),)
MAKE_VENV := uv venv --quiet --seed --clear --python
INSTALL := uv pip install --quiet --python $(BIN)/python --constraint constraints.txt
else
MAKE_VENV := $(PYTHON) -m venv --clear
INSTALL := $(BIN)/python -m pip install $(PIP_FLAGS) --no-compile --constraint constraints.txt
endif

# A terminal shows the newest line of an installation, in place of the one before. Its log is printed if it fails.
FAILED := The installation failed.
ONE_LINE := if [ -t 1 ]; then awk '/^ *[A-Z][a-z]/ { printf "\r%-79.79s", $$0; fflush() } END { printf "\r%79s\r", "" }'; \
	else cat >/dev/null; fi

# The libraries that pyproject.toml names, for the lines that say what is installed.
LIBRARIES = $(shell sed -n '/^dependencies = \[/,/^]/s/^ *"\([A-Za-z0-9_-]*\).*/\1/p' pyproject.toml | uniq | paste -sd ' ' -)

# Tests run in parallel. They are distributed by file, because the tests of a file share models and processes. The
# folders with the longest files come first. In pytest's own order such files, which have few tests, would run at the end.
JOBS ?= 2
# Hypothesis's profile "ci" draws the same examples every time. Without it, pytest draws new ones.
PYTEST := $(BIN)/python -m pytest --hypothesis-profile ci
PARALLEL := $(PYTEST) --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder
# Whole programs wait more than they compute, so more of their tests run at once than there are cores.
PROGRAM_JOBS ?= 3
PROGRAMS := $(PARALLEL) --numprocesses $(PROGRAM_JOBS)

PART_TESTS := tests/parity tests/unit tests/repository tests/fuzz
METAL_TESTS := $(patsubst %,tests/parity/test_%.py,rollback run_ahead head engine exact_mode)
# The files with thorough tests: collecting all of them again takes a while.
THOROUGH_TESTS = $(sort $(shell grep -rl --include='test_*.py' 'mark\.thorough' $(PART_TESTS)))
PROGRAM_TESTS := tests/browser tests/cluster tests/chaos tests/clients

BENCHES ?= $(basename $(notdir $(shell grep -l __main__ tests/bench/*.py)))

PACKAGE := $(abspath $(VENV))/package

GENERATED := proto/cluster_pb2.py proto/cluster_pb2.pyi proto/cluster_pb2_grpc.py proto/cluster_pb2_grpc.pyi
PROTOC = PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m grpc_tools.protoc --proto_path=. \
	--python_out=$(1) --grpc_python_out=$(1) --mypy_out=$(1) --mypy_grpc_out=$(1) proto/cluster.proto

.PHONY: help demo test test-all test-metal test-slow nightly clients package check fmt bench proto check-proto constraints clean
.DEFAULT_GOAL := help

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | column -t -s '|'

demo: $(VENV)/.runtime ## three workers and a coordinator on this machine, one prompt over HTTP
	$(BIN)/mtp-coord demo

test: $(VENV)/.dev ## the tests of every contract, in some six minutes on two cores
	$(PARALLEL) -m 'not slow and not thorough' $(PART_TESTS)
	$(PROGRAMS) -m smoke $(PROGRAM_TESTS)

test-all: $(VENV)/.dev ## the rest: more cases, and whole programs on loopback
	$(PARALLEL) -m 'thorough and not slow' $(THOROUGH_TESTS)
	$(PROGRAMS) -m 'not slow and not smoke' $(PROGRAM_TESTS)

test-metal: $(VENV)/.dev ## tests of states and engines on the Metal path, whose kernels run on the CPU; needs g++
	$(PARALLEL) --dist load -p tests.support.metal.plugin -m 'not slow and not thorough' $(METAL_TESTS)

test-slow: $(VENV)/.dev ## the tests that take long, or whose contract a faster test guards too
	$(PYTEST) -m slow

clients: $(VENV)/.dev ## install the clients of other projects, and test with them
	$(PYTHON) -m venv .cache/clients/python
	.cache/clients/python/bin/python -m pip install $(PIP_FLAGS) -r tests/clients/python/requirements.txt
	$(PYTHON) -m venv .cache/clients/openai-2
	.cache/clients/openai-2/bin/python -m pip install $(PIP_FLAGS) -r tests/clients/python/requirements-openai-2.txt
	mkdir -p .cache/clients/node
	cp tests/clients/node/package.json .cache/clients/node/
	if command -v npm >/dev/null; then cd .cache/clients/node && npm install --silent --no-audit --no-fund; \
		else echo "npm is not installed, so the clients of node are skipped."; fi
	$(PYTEST) tests/clients

nightly: $(VENV)/.dev ## 10,000 faults in virtual time, 260 real ones, and 100 ends of processes at any moment
	$(BIN)/python -m tests.chaos.virtual --faults 10000
	$(BIN)/python -m tests.chaos.run --kinds process,network,host,storm,group,ends

# The wheel is built from the sdist, so that both are complete. It runs outside the repository, in an empty environment.
package: $(VENV)/.dev ## build the sdist and the wheel of a release, install the wheel alone, and run it
	rm -rf dist $(PACKAGE)
	$(BIN)/python -m hatchling build --target sdist --directory dist
	$(BIN)/python -m pip wheel $(PIP_FLAGS) --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv $(PACKAGE)
	$(PACKAGE)/bin/python -m pip install $(PIP_FLAGS) --no-compile --constraint constraints.txt dist/*.whl
	cd / && $(PACKAGE)/bin/mtp-coord --version && $(PACKAGE)/bin/mtp-worker --version
	cd / && $(PACKAGE)/bin/mtp-coord generate --raw --prompt 'def fibonacci(n):' --max-tokens 20 --temp 0

check: $(VENV)/.dev check-proto ## lint, format, types, generated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fmt: $(VENV)/.dev ## format the code and apply automatic fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev ## run the benches, or some of them: make bench BENCHES=exactness
	@for bench in $(BENCHES); do echo "== $$bench"; $(BIN)/python -m tests.bench.$$bench || exit 1; done

proto: $(VENV)/.dev ## generate proto/cluster_pb2* from proto/cluster.proto
	$(call PROTOC,.)

check-proto: $(VENV)/.dev
	@rm -rf $(VENV)/proto-check && mkdir -p $(VENV)/proto-check
	@$(call PROTOC,$(VENV)/proto-check)
	@for file in $(GENERATED); do cmp "$$file" "$(VENV)/proto-check/$$file" \
		|| { echo "$$file differs from proto/cluster.proto. Run 'make proto'." >&2; exit 1; }; done

constraints: ## resolve constraints.txt again, as a clean installation does today
	$(PYTHON) -m venv --clear $(VENV)-constraints
	$(VENV)-constraints/bin/python -m pip install $(PIP_FLAGS) '.[dev]' '$(TORCH)'
	{ echo "# Versions the tests passed with (CPython 3.11, Linux). Written by \`make constraints\`."; \
	  $(VENV)-constraints/bin/python -m pip freeze --exclude mtp-cluster | sed 's/+.*//'; } > constraints.txt.new
	mv constraints.txt.new constraints.txt
	rm -rf $(VENV)-constraints

clean: ## remove .venv and the files of tools
	rm -rf $(VENV) .cache/clients build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "mtp-cluster needs Python 3.11 or later; $(PYTHON) is '$$($(PYTHON) --version 2>&1)'." >&2; \
		echo "Use another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "Creating $(VENV) with $$($(PYTHON) --version 2>&1)"
	@$(MAKE_VENV) $(if $(UV),"$(PYTHON)") $(VENV)
	@touch $@

$(VENV)/.runtime: $(VENV)/.made pyproject.toml constraints.txt
	@echo "Installing mtp-cluster and its libraries into $(VENV): a minute or two the first time, on a slow line longer."
	@{ $(subst --quiet,,$(INSTALL)) --editable . 2>&1 || echo "$(FAILED)"; } | tee $(VENV)/install.log | $(ONE_LINE)
	@if grep -qxF "$(FAILED)" $(VENV)/install.log; then cat $(VENV)/install.log >&2; exit 1; fi
	@touch $@

$(VENV)/.dev: $(VENV)/.made pyproject.toml constraints.txt
	@echo "Installing mtp-cluster into $(VENV), with $(LIBRARIES), and the tools for its tests."
	@echo "The first time this takes a minute or two: PyTorch, for comparison, is the largest."
	@$(INSTALL) --editable '.[dev]'
	@$(BIN)/python -m pip install $(PIP_FLAGS) --constraint constraints.txt '$(TORCH)' \
		|| echo "No CPU build of $(TORCH) found. The tests that compare with transformers will be skipped." >&2
	@touch $(VENV)/.runtime $@
