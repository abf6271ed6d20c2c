# The one list of commands; everything else calls these.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
comma := ,
# The CPU build of MLX where there is no Apple GPU.
EXTRAS := $(if $(filter Darwin,$(shell uname -s)),dev,cpu$(comma)dev)
STAMP := $(VENV)/.ready-$(subst $(comma),-,$(EXTRAS))
PYTEST := $(BIN)/python -m pytest
STOCK ?=

.PHONY: help env test test-all test-oldest demo fingerprints patches lint format clean

help:
	@echo "make test          set up $(VENV) and run the default tests"
	@echo "make test-all      all tests, the slow ones too"
	@echo "make test-oldest   a sample of the behaviour tests on the oldest mlx-vlm that is supported"
	@echo "make demo          stock beside plus on the bundled models, with the table"
	@echo "make fingerprints  hash the targets in the installed stock, or in STOCK='DIR DIR'"
	@echo "make patches       write the patch series anew"
	@echo "make lint          ruff, black, isort, mypy"
	@echo "make format        let black and ruff rewrite the sources"
	@echo "make clean         remove $(VENV) and what tools left"

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt startup/mlx_vlm_cacheplus.pth startup/mlx_vlm_cacheplus.start
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Python 3.10 or newer is needed: make PYTHON=python3.12"; exit 1; }
	@echo "Setting up $(VENV): mlx-vlm, MLX and the tools of the tests ($(EXTRAS)) are downloaded and installed there. This takes some minutes."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

test: env
	$(PYTEST) -m "not slow"
	$(BIN)/python tools/run_legs.py --patch-tests

test-all: env
	$(PYTEST)
	$(BIN)/python tools/run_legs.py --whole --each-patch --each-alone --each-off --each-release

test-oldest: env
	$(BIN)/python tools/run_legs.py --legs "" --releases 0.7.6

demo: env
	$(BIN)/python -m mlx_vlm_cacheplus.replay.demo

fingerprints: env
	$(BIN)/python -m mlx_vlm_cacheplus.fingerprint refresh $(if $(STOCK),--stock $(STOCK))

patches: env
	$(BIN)/python tools/make_patches.py

lint: env
	$(BIN)/ruff check .
	$(BIN)/black --check --quiet .
	$(BIN)/isort --check --quiet .
	$(BIN)/mypy

format: env
	$(BIN)/ruff check --fix .
	$(BIN)/black --quiet .
	$(BIN)/isort --quiet .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
