# `make test` and `make demo` need Python 3.11 or newer and a C++ compiler, and set up the rest
# themselves. Without a compiler: make test REVRNN_PURE=1

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip

# REVRNN_PURE as pyproject.toml reads it. The two kinds of install have a stamp each; making one
# removes the other.
PURE := $(filter-out 0 n no N NO No off OFF Off f F false FALSE False,$(REVRNN_PURE))
ENV_STAMP := $(VENV)/.revrnn-env
INSTALL_STAMP := $(VENV)/.revrnn-$(if $(PURE),pure,native)
# Python files are not here: the install is editable.
BUILD_INPUTS := pyproject.toml \
    $(if $(PURE),,CMakeLists.txt src/revrnn/fixed.py $(wildcard csrc/*))

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Kept between builds, so that a changed kernel recompiles only itself.
export SKBUILD_BUILD_DIR := build/{wheel_tag}

.DEFAULT_GOAL := help
.PHONY: help env demo test test-slow lint format bench clean distclean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18

env: $(INSTALL_STAMP) ## set up .venv and build the kernels; again after an edit in csrc/

demo: $(INSTALL_STAMP) ## train a small language model for 1.5 minutes, show what it saves
	$(BIN)/python examples/demo.py

test: lint ## lint, types, import layers, tests
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-slow: $(INSTALL_STAMP) ## the tests that take minutes
	$(BIN)/python -m pytest -m slow --timeout=3600 $(PYTEST_ARGS)

lint: $(INSTALL_STAMP) ## ruff, mypy, import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(INSTALL_STAMP) ## let ruff fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALL_STAMP) ## time the layers against torch.nn
	$(BIN)/python -m benchmarks.layers

clean: ## remove what was built and cached; .venv stays
	rm -rf build dist src/revrnn/_cpu*.so .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	rm -f $(VENV)/.revrnn-*
	find $(wildcard src tests benchmarks examples) -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove .venv as well
	rm -rf $(VENV)

# torch first: it is by far the largest, and the build does not need it.
$(ENV_STAMP):
	@command -v $(PYTHON) > /dev/null || { echo >&2 \
	    "$(PYTHON) was not found: install Python 3.11 or newer (on Debian: apt install python3 python3-venv python3-dev), or name one with PYTHON=."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo >&2 \
	    "$(PYTHON) is $$($(PYTHON) -V 2>&1), and revrnn needs Python 3.11 or newer: name one with PYTHON=."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2> /dev/null || { echo >&2 \
	    "$(PYTHON) cannot create virtual environments: install its venv module (on Debian: apt install python3-venv)."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install $(TORCH)
	@touch $@

# Without build isolation, so that the build directory stays valid from one build to the next; the
# build requirements are those of pyproject.toml.
$(INSTALL_STAMP): $(ENV_STAMP) $(BUILD_INPUTS)
	@rm -f $(VENV)/.revrnn-native $(VENV)/.revrnn-pure
	@$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' \
	    > $(VENV)/.revrnn-requires
	$(PIP) install --quiet --requirement $(VENV)/.revrnn-requires $(if $(PURE),,cmake ninja)
	$(PIP) install --quiet --no-build-isolation --editable '.[cli,dev]'
	@touch $@
