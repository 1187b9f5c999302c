# Every target sets up .venv by itself when it is missing or older than pyproject.toml, and reuses it otherwise.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

BASE := .venv/.stamp-base
DEV := .venv/.stamp-dev
OLDEST := .venv-oldest/.stamp-dev
BIN := .venv/bin
WORKERS ?= 2

# Compiled XLA programs are kept between test runs; delete .cache (make clean) to start cold.
CACHED := JAX_COMPILATION_CACHE_DIR="$(CURDIR)/.cache/jax" JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.3
# A file stays on one worker: its tests share compiled programs and fixtures. Files are handed out in the order of tests/conftest.py.
PYTEST := $(CACHED) $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Nearly all of the tests' time is compilation; OPTIMISED=1 compiles as programs of users are (docs/decisions/0022).
QUICK = $(if $(OPTIMISED),,XLA_FLAGS="$$($(1)/python tools/quick_xla.py) $$XLA_FLAGS")
CODE := aleator tests docs tools .ci $(wildcard benchmarks)

.PHONY: help demo test test-long test-oldest coverage lint format docs bench env clean

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(BASE): pyproject.toml
	@bash tools/setup_env.sh base

$(DEV): pyproject.toml
	@bash tools/setup_env.sh dev

$(OLDEST): pyproject.toml requirements/oldest.txt
	@bash tools/setup_env.sh oldest

env: $(DEV) ## the environment with all tools, nothing else

demo: $(BASE) ## fit bundled data with three methods, print a table, draw a picture
	@$(BIN)/aleator demo $(ARGS)

test: $(DEV) ## tests and doctests
	@$(call QUICK,$(BIN)) $(PYTEST) $(ARGS)

test-long: $(DEV) ## the full product of the conformance suite, and the statistical tests
	@$(PYTEST) -m long $(ARGS)

test-oldest: $(OLDEST) ## the suite on the oldest versions that pyproject.toml allows
	@$(call QUICK,.venv-oldest/bin) JAX_COMPILATION_CACHE_DIR="$(CURDIR)/.cache/jax-oldest" .venv-oldest/bin/pytest -n $(WORKERS) $(ARGS)

coverage: $(DEV) ## the same, a fifth slower; which lines are not tested (htmlcov/index.html), fails below 90 %
	@$(call QUICK,$(BIN)) $(PYTEST) --cov --cov-report=term-missing:skip-covered --cov-report=html --cov-fail-under=90 $(ARGS)

lint: $(DEV) ## ruff (rules and format) and mypy
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/ruff format --check $(CODE)
	@$(BIN)/mypy

format: $(DEV) ## let ruff repair and format the code
	@$(BIN)/ruff check --fix $(CODE)
	@$(BIN)/ruff format $(CODE)

docs: $(DEV) ## run every page and build docs/_build/index.html (ARGS=--fast: small sizes)
	@$(if $(findstring --fast,$(ARGS)),$(call QUICK,$(BIN))) $(CACHED) $(BIN)/python docs/build.py $(ARGS)

bench: $(DEV) ## reproduce the published tables and the speed ratios (hours; ONLY=speed for one script)
	@set -e; for script in $(if $(ONLY),benchmarks/$(ONLY).py,$(filter-out benchmarks/_%,$(wildcard benchmarks/*.py))); do \
		echo "== $$script"; $(BIN)/python $$script $(ARGS); \
	done
	@$(BIN)/python benchmarks/_summary.py

clean: ## remove caches and build products, keep the environments
	rm -rf .cache .pytest_cache .mypy_cache .ruff_cache .coverage .coverage.* htmlcov build dist *.egg-info docs/_build
	find aleator tests docs tools benchmarks .ci -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
