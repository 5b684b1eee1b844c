# Needs Python 3.11 or later and make. Everything else goes into .venv, once.

PYTHON ?= python3
GPU ?= auto
# Three on two cores: tests wait for processes that they start a third of the time.
JOBS ?= 3
TEST_TIMEOUT ?= 600
# Where an environment keeps no bytecode, each of hundreds of processes would compile every module anew.
export PYTHONDONTWRITEBYTECODE :=

BIN := .venv/bin
STAMP := .venv/.complete

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all test-seeds unit gpu-test lint format docs wheel check-wheel clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

demo: $(STAMP) ## plan, time and train a small network on this machine
	$(BIN)/python examples/demo.py

test: lint unit ## lint, then run all tests that this machine can run

unit: $(STAMP) ## the tests alone; ARGS='-k word' narrows them
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --timeout $(TEST_TIMEOUT) $(ARGS)

# Emulated kernels take seconds a case: make test runs a sample of their cases. It draws the same examples everywhere;
# this draws new ones, and says by which seed (TILEWISE_SEED).
test-all: lint ## as test, with every case of every test, drawn anew (tens of minutes)
	TILEWISE_EVERY_TEST=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --timeout $(TEST_TIMEOUT) $(ARGS)

SEEDS ?= 100
test-seeds: $(STAMP) ## generated tests with SEEDS=100 seeds (hours; goes on where it was stopped); TESTS='file ...' narrows
	$(BIN)/python tools/draw_seeds.py --seeds $(SEEDS) $(TESTS)

# Uses whatever Python is current and has torch with CUDA: installs nothing, needs no network.
gpu-test: ## the tests marked gpu, in the current environment
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu $(ARGS)

lint: $(STAMP) ## ruff, mypy and the layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --config pyproject.toml

format: $(STAMP) ## let ruff rewrite what it can
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

docs: $(STAMP) ## the manual, in docs/_build/html
	$(BIN)/python -m sphinx -W --keep-going -j auto -b html docs docs/_build/html

# The wheel is built from the source distribution, so that whoever has only that can build it, too.
wheel: $(STAMP) ## the wheel and the source distribution, in dist/, checked by twine
	rm -rf dist
	$(BIN)/python -m pip install -q -c constraints.txt --build-constraint constraints.txt --editable '.[release]'
	PIP_BUILD_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

check-wheel: $(STAMP) ## the wheel in a fresh environment with each extra (minutes); EXTRAS='cpu caffe' narrows
	$(BIN)/python -m tools.check_wheel $(EXTRAS)

clean: ## remove .venv and everything built
	rm -rf .venv build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .test-seeds.json
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt constraints-cpu.txt tools/setup_env.py
	$(PYTHON) tools/setup_env.py --gpu $(GPU) $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))
	@touch $@
