# Each rule sets up .venv by itself the first time (scripts/setup_cpu.sh); a second call starts at once.
BIN := .venv/bin
# The environment with a GPU, SGLang and this package in it.
GPU_PYTHON ?= python3

# The negative control: servers that also import test/demo_break/$(BREAK), which breaks the feature on purpose.
BROKEN = $(or $(wildcard test/demo_break/$(BREAK)),$(error BREAK is one of: $(notdir $(wildcard test/demo_break/*))))

.PHONY: help setup demo test test-gpu test-upstream mutants soak lint

help:
	@echo "make demo     the real server on CPU, two ranks: expanded against non-expanded prefill (QUICK=1: one checkpoint;"
	@echo "              BREAK=fold: must fail)"
	@echo "make test     every test that needs no GPU"
	@echo "make test-gpu the GPU tests, with GPU_PYTHON=python3"
	@echo "make test-upstream   the same on SGLang with the patch laid into it, without the loader"
	@echo "make mutants  break the feature line by line and see the tests fail (ARGS='part of a name' chooses)"
	@echo "make soak     2,000 random layers over four ranks, every output checked (ARGS='--layers 100' for fewer)"
	@echo "make lint     ruff check and format"

setup:
	@scripts/setup_cpu.sh

demo: setup
	$(BIN)/sglang-deepep-v2 ab $(if $(QUICK),--quick) $(if $(BREAK),--server-pythonpath $(BROKEN))

test: setup
	$(BIN)/python -m pytest test/srt -m "not gpu" -n 2 $(ARGS)

test-gpu:
	$(GPU_PYTHON) -m pytest test/srt -m gpu $(ARGS)

test-upstream: setup
	rm -rf .upstream
	$(BIN)/sglang-deepep-v2 upstream --into .upstream
	PYTHONPATH=$(CURDIR)/.upstream/python SGLANG_OVERLAY=0 $(BIN)/python -m pytest test/srt -m "not gpu" -n 2 $(ARGS)

mutants: setup
	$(BIN)/python test/mutants.py $(ARGS)

soak: setup
	$(BIN)/python test/soak.py $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
