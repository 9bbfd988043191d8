# make train    install, then train the laptop model and let it write      PRESET=smoke takes a minute
# make test     install, then lint and the fast tests                      make test-all: the slow ones too
# make help     everything else
#
# Settings: PRESET (laptop), TORCH (cpu or cuda; left out: cuda where nvidia-smi lists a card, else cpu),
#           PYTHON (the first of python3, python3.13, python3.12, python3.11 that is 3.11 or newer), VENV (.venv), ARGS

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help install dev train test test-all test-gpu test-browser compile-check lint coverage bench clean

PRESET ?= laptop
ARGS ?=
VENV ?= .venv
TORCH ?= $(if $(shell nvidia-smi -L 2>/dev/null),cuda,cpu)
BIN := $(VENV)/bin
BENCH ?= benchmarks/import_time.py $(wildcard benchmarks/*_cpu.py) $(if $(filter cuda,$(TORCH)),benchmarks/kda.py)

TORCH_VERSION := $(shell sed -n 's/^torch==//p' constraints.txt)
# The Triton kernels run in its interpreter on a CPU (Linux only). A CUDA build of torch brings its own release.
TRITON := $(if $(filter cpu-Linux,$(TORCH)-$(shell uname -s)),triton==3.6.0)
# PyTorch's own list of CPU builds; PyPI's build for Linux is the CUDA one, with several GB of libraries.
TORCH_CPU_LIST := https://download.pytorch.org/whl/cpu/torch/

PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
INSTALL := $(PIP) install --constraint constraints.txt
TORCH_STAMP := $(VENV)/.torch-$(TORCH)-$(TORCH_VERSION)
INSTALLED := $(VENV)/.installed-$(TORCH)
DEV := $(VENV)/.dev-$(TORCH)
# One process a core with one thread each: tests are many small operations, which threads only slow down.
PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8

ifeq ($(filter cpu cuda,$(TORCH)),)
$(error TORCH: found '$(TORCH)', need cpu or cuda)
endif

help:
	@echo 'make install    a virtual environment in $(VENV) with the $(TORCH) build of torch, and trine'
	@echo 'make train      trine train --preset $(PRESET)   (ARGS="..." adds options)'
	@echo 'make test       ruff, mypy and the fast tests    (ARGS="-k kda" picks some)'
	@echo 'make test-all   also the full matrices, long fuzzing and kills'
	@echo 'make test-gpu   the tests that need a CUDA card'
	@echo 'make test-browser   the tests that drive the dashboard in headless Chromium'
	@echo 'make compile-check   the table of compiled GPU kernels against the shipped ones; needs no card'
	@echo 'make coverage   the fast tests, with the lines they miss'
	@echo 'make bench      the benchmarks, each beside its peers; records go to benchmarks/results'
	@echo 'make clean      removes $(VENV) and caches, never runs'

install: $(INSTALLED)
dev: $(DEV)

train: $(INSTALLED)
	$(BIN)/trine train --preset $(PRESET) $(ARGS)

test: lint
	$(PYTEST) -m 'not slow and not gpu and not browser' $(ARGS)

test-all: lint
	$(PYTEST) -m 'not gpu and not browser' $(ARGS)

test-gpu: $(DEV)
	$(BIN)/python -m pytest -m gpu $(ARGS)

test-browser: $(DEV)
	$(BIN)/python -m pytest -m browser $(ARGS)

compile-check: $(DEV)
	$(BIN)/python benchmarks/compile_check.py $(ARGS)

lint: $(DEV)
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy

coverage: $(DEV)
	$(PYTEST) -m 'not slow and not gpu and not browser' --cov=trine --cov-report=term-missing:skip-covered $(ARGS)

bench: $(VENV)/.bench-$(TORCH)
	for script in $(BENCH); do echo "== $$script"; $(BIN)/python "$$script" $(ARGS); done

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage build dist
	find . -name __pycache__ -type d -not -path './runs/*' -prune -exec rm -rf {} +

# Each step leaves a stamp, so that repeating a command costs nothing and a change of pyproject.toml or of the
# constraints repeats exactly what depends on it.

$(VENV)/.python:
	@python=''; for candidate in $(or $(PYTHON),python3 python3.13 python3.12 python3.11); do \
	    if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "trine needs Python 3.11 or newer; found $$($(or $(PYTHON),python3) --version 2>&1 || true). Say which with PYTHON=..." >&2; exit 1; \
	fi; \
	echo "making $(VENV) with $$($$python --version)"; \
	$$python -m venv $(VENV)
	@touch $@

$(TORCH_STAMP): $(VENV)/.python
	@if ls $(VENV)/.torch-* >/dev/null 2>&1; then $(PIP) uninstall --yes torch triton; rm -f $(VENV)/.torch-*; fi
ifeq ($(TORCH)-$(shell uname -s),cpu-Linux)
	@echo 'installing the CPU build of torch $(TORCH_VERSION), about 200 MB (TORCH=cuda takes the CUDA build instead)'
	@$(INSTALL) --retries 1 --timeout 20 --find-links $(TORCH_CPU_LIST) 'torch==$(TORCH_VERSION)+cpu' numpy 2>$(VENV)/.torch.log || { \
	    echo 'no CPU build named $(TORCH_VERSION)+cpu within reach ($(VENV)/.torch.log); taking what the package index has'; \
	    $(INSTALL) 'torch==$(TORCH_VERSION)' numpy; }
else
	@echo 'installing torch $(TORCH_VERSION) from the package index ($(TORCH) build)'
	@$(INSTALL) 'torch==$(TORCH_VERSION)' numpy
endif
	@$(BIN)/python -c 'import sys, torch; built = "cuda" if torch.version.cuda else "cpu"; \
	    print(f"torch {torch.__version__} is a {built} build"); \
	    sys.exit("TORCH=cuda: this index gave a CPU build" if ("$(TORCH)", built) == ("cuda", "cpu") else 0)'
	@touch $@

$(INSTALLED): $(TORCH_STAMP) pyproject.toml constraints.txt
	@echo 'installing trine and what it needs'
	@$(INSTALL) --editable .
	@touch $@

$(DEV): $(INSTALLED)
	@echo 'installing the tools of the tests'
	@$(INSTALL) --editable '.[dev,dashboard]' $(TRITON)
	@touch $@

$(VENV)/.bench-$(TORCH): $(DEV)
	@echo 'installing the peers that the benchmarks measure'
	@$(INSTALL) --editable '.[bench]'
	@touch $@

