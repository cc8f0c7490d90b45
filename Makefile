# Two commands matter: `make serve` and `make test`. Everything lives in .venv and build/; `make clean` removes both.
.DEFAULT_GOAL := help
SHELL := /bin/bash

# What people may set on the command line or in the environment.
PORT        ?= 8000
MODEL       ?= smollm2-135m
ASK         ?= Why do fish swim in shoals? Answer in two sentences.
SERVE_ARGS  ?=
BENCH_ARGS  ?=
PYTEST_ARGS ?=
PYTHON      ?= python3.11
PIP_ARGS    ?=
# Installed before the project, so that pip does not choose a build of it on its own.
TORCH       ?= torch==2.13.0
VENV        ?= .venv

# Through the environment, so that quotes in a question are only characters.
export MODEL ASK

BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip --disable-pip-version-check
FOLDERS := configs kernels kvcache model_shards guardrails deployments
TYPES   := build/types

.PHONY: help
help:
	@echo 'Shoal: LLM serving on Ray Serve with an engine of its own.'
	@echo
	@echo '  make serve    install into $(VENV), fetch a small real model, serve it on http://127.0.0.1:$(PORT)/v1'
	@echo '                  PORT=8000 MODEL=smollm2-135m (also: a .gguf file, a directory, a hub id, scripted:FILE.json)'
	@echo '                  SERVE_ARGS="..." is passed on to `shoal serve`'
	@echo '  make test     install the development set, lint, type-check, run every test (PYTEST_ARGS="-k name")'
	@echo '  make bench    measure the server that `make serve` started (BENCH_ARGS="--workload W2")'
	@echo '  make lint | types | format | wheel | clean'
	@echo
	@echo '  PYTHON=python3.11 chooses the interpreter, PIP_ARGS="..." is added to every `pip install`,'
	@echo '  TORCH="torch==2.13.0" chooses the build of torch, VENV=.venv the place.'

.PHONY: serve
serve: $(VENV)/.serve
	@$(BIN)/shoal serve "$$MODEL" --port $(PORT) --ask "$$ASK" $(SERVE_ARGS)

.PHONY: bench
bench: $(VENV)/.serve
	@$(BIN)/shoal bench --url http://127.0.0.1:$(PORT) $(BENCH_ARGS)

.PHONY: test
test: lint types
	$(BIN)/python -m pytest $(PYTEST_ARGS)

.PHONY: lint
lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.PHONY: format
format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mypy does not follow the import hook of an editable install, so it is shown the folders under their import root.
.PHONY: types
types: $(VENV)/.dev
	@mkdir -p $(TYPES)/shoal
	@ln -sfn $(addprefix $(CURDIR)/,$(FOLDERS)) -t $(TYPES)/shoal
	cd $(TYPES) && MYPYPATH=. $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml -p shoal

.PHONY: wheel
wheel: $(VENV)/.dev
	$(BIN)/python -m build --wheel

.PHONY: clean
clean:
	rm -rf $(VENV) build dist shoal.egg-info .pytest_cache .ruff_cache .hypothesis

# The stamps make a second run quick: pip runs again only when pyproject.toml or the Makefile changed.
$(VENV)/.python:
	$(PYTHON) -c 'import sys; sys.exit("Shoal needs Python 3.11 or newer; set PYTHON=..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.torch: $(VENV)/.python
	$(PIP) install $(PIP_ARGS) '$(TORCH)'
	@touch $@

$(VENV)/.serve: $(VENV)/.torch pyproject.toml
	$(PIP) install $(PIP_ARGS) --editable . '$(TORCH)'
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(PIP) install $(PIP_ARGS) --editable '.[dev]' '$(TORCH)'
	@touch $@ $(VENV)/.serve
