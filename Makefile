# mrl: `make train` and `make test` do all the set-up on a fresh machine.
PYTHON_VENV := .venv/bin/python
ARGS ?=
# two test processes, each with warm ranks of its own
BESIDE := -n 2

.DEFAULT_GOAL := help
.PHONY: help setup train test test-all check bench clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo '  Add arguments with ARGS, as in: make test ARGS="-k planner"'

setup:  ## make .venv with the pinned packages and the mrl command (redone when the pins change)
	@bash requirements/install.sh

train: setup  ## the CPU quickstart: small model, real tasks, supervised warm-up, then GRPO
	.venv/bin/mrl quickstart $(ARGS)

test: setup  ## the fast tests
	$(PYTHON_VENV) -m pytest $(BESIDE) -m "not slow and not gpu" --durations=15 $(ARGS)

test-all: setup  ## every test that needs no GPU
	$(PYTHON_VENV) -m pytest $(BESIDE) -m "not gpu" --durations=25 $(ARGS)

check: setup  ## lint, format and types
	$(PYTHON_VENV) -m ruff check .
	$(PYTHON_VENV) -m ruff format --check .
	$(PYTHON_VENV) -m mypy

bench: setup  ## list the benchmarks, or run one: make bench ARGS="train_step --smoke"
	.venv/bin/mrl bench $(ARGS)

clean:  ## remove caches and build output (keeps .venv and runs)
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
