# Everything a developer runs. `make demo` and `make test` need no other step.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
STAMP := $(VENV)/.installed
export PYTHONDONTWRITEBYTECODE ?=
# Resolves what is installed here into the file named behind it, which also holds the versions to keep.
COMPILE_LOCK = $(BIN)/uv pip compile -q pyproject.toml requirements/worker-cpu.in \
  --extra operator --extra gateway --extra cli --extra dev --override requirements/overrides.txt \
  --generate-hashes --no-annotate --no-header --python-version 3.11 -o
# Two test processes, each with a local cluster of its own. Any other cluster is shared, so one process uses it.
SIDE_BY_SIDE := -n 2 --dist loadscope --no-loadscope-reorder
E2E_SIDE_BY_SIDE := $(if $(filter-out local,$(CLUSTER)),,$(SIDE_BY_SIDE))
# The name of the demo's cluster, so that it never meets the tests'.
DEMO := demo

.DEFAULT_GOAL := help
.PHONY: help setup demo down unit test e2e lint format verify generate lock compiled bench

help: ## List the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

$(STAMP): requirements/lock.txt requirements/bootstrap.txt pyproject.toml
	@echo "[setup] Python packages (about 7 GB and 3 to 6 minutes the first time)"
	@command -v $(PYTHON) >/dev/null \
	  || { echo "[setup] there is no $(PYTHON) here. Name one that is: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "[setup] $(PYTHON) is older than 3.11. Name a newer one: make PYTHON=python3.12 ..."; exit 1; }
	@$(BIN)/uv --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) \
	  || { echo "[setup] the venv module failed. On Debian: apt-get install python3-venv"; exit 1; }
	@$(BIN)/pip install -q --disable-pip-version-check --require-hashes -r requirements/bootstrap.txt
	@$(BIN)/uv pip sync -q --python $(PY) --require-hashes requirements/lock.txt
	@$(BIN)/uv pip install -q --python $(PY) --no-deps --no-build-isolation -e .
	@touch $@

setup: $(STAMP) ## Install all that the demo and the tests need (also done by each target that needs it)
	@$(PY) -m e2e.setup

demo: setup ## Run the demo: a cluster, real workers, a load, a flip (KEEP=1 leaves it running)
	@$(PY) -m e2e.demo --name $(DEMO) $(if $(KEEP),--keep)

down: $(STAMP) ## End a demo that was kept running
	@$(PY) -m e2e.cluster down --name $(DEMO)

unit: $(STAMP) ## Unit tests without the thorough ones: no service, under a minute
	@$(PY) -m pytest -q -m 'not thorough' $(SIDE_BY_SIDE) tests

e2e: setup ## End-to-end tests on a real API server with real workers (CLUSTER=local|kind|current)
	@$(PY) -m pytest $(E2E_SIDE_BY_SIDE) e2e

test: setup lint verify ## All checks and all tests
	@$(PY) -m pytest $(E2E_SIDE_BY_SIDE) tests e2e

lint: $(STAMP) ## Style, types and the law of imports
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

format: $(STAMP) ## Put the code in its form
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

verify: $(STAMP) ## Prove that generated files are current
	@$(PY) -m headrace_core.api.crdgen --check crds
	@mkdir -p build && cp requirements/lock.txt build/lock.txt && $(COMPILE_LOCK) build/lock.txt \
	  && diff -q requirements/lock.txt build/lock.txt >/dev/null \
	  || { echo "requirements/lock.txt does not fit pyproject.toml: run 'make lock'"; exit 1; }

generate: $(STAMP) ## Make the generated files anew
	@$(PY) -m headrace_core.api.crdgen crds

lock: ## Resolve the locked requirements anew
	@$(BIN)/uv pip compile -q requirements/bootstrap.in --generate-hashes --no-annotate --no-header \
	  -o requirements/bootstrap.txt
	@$(COMPILE_LOCK) requirements/lock.txt

compiled: $(STAMP) ## Compile the core into a cache outside the tree, and say where (the first time about a minute)
	@$(PY) -m bench.core.compiled

bench: setup ## Measure speed (DISTSERVE=DIR: compare with a checkout of LLMServe/DistServe, too)
	@for what in bench.flip_switch bench.core.decisions bench.core.simulator bench.core.planner; do \
	  echo "== $$what"; $(PY) -m $$what || exit 1; done
	@$(if $(DISTSERVE),echo "== bench.core.parity"; $(PY) -m bench.core.parity --distserve $(DISTSERVE))
