# Every target works on a clean checkout: the first one that needs it builds .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Pins hold for everything pip resolves here, also inside build isolation.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo test check pytest bench chaos check-arm64 clean

help: ## show this list
	@echo "make targets (PYTHON=$(PYTHON) builds $(VENV)):"
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

venv: $(STAMP) ## build .venv with the pinned dependencies

$(STAMP): pyproject.toml constraints.txt
	rm -f $@
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP) ## train a detector on four devices and on one, and compare; about two minutes
	$(BIN)/terrazzo demo $(ARGS)

test: check pytest ## lint, types, import contracts, then all tests

check: $(STAMP) ## lint, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Many tests wait for devices, so there is one worker more than cores: with five on two cores some
# tests that watch each other die became too slow. Idle ones steal the tests of others.
WORKERS := $(shell n=$$(nproc); test $$n -lt 4 && echo $$((n + 1)) || echo 4)

pytest: $(STAMP) ## the tests alone, on all cores; pass options with ARGS="-n 0 -k launch"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

bench: $(STAMP) ## run the benchmarks
	$(BIN)/python -m terrazzo.bench $(ARGS)

chaos: $(STAMP) ## 200 faults at random, numbers compared each time, in the lab as root; ARGS="--seed 7"
	$(BIN)/python tools/chaos.py --faults 200 $(if $(filter 0,$(shell id -u)),--lab) $(ARGS)

check-arm64: $(STAMP) ## wheels and an emulated core for 64-bit Arm boards; ARGS="--torch 2.9.1"
	$(BIN)/python tools/check_arm64.py $(ARGS)

clean: ## remove .venv, caches and build outputs
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
