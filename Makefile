# `make demo` and `make test` install everything they need into .venv, once.

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
LOWEST := .venv-lowest/bin
# one process more than there are cores, since tests also wait; each takes 2 GB; a file's fixtures are made once
SPREAD = --dist loadfile --numprocesses $(shell $(PYTHON) -c 'import os; print(min(4, os.cpu_count() + 1))')
OLD := -W ignore::DeprecationWarning -W ignore::FutureWarning -W 'ignore:Config Deprecation:UserWarning'
SHARE ?= 1/1
SHELL := bash
unexport PYTHONDONTWRITEBYTECODE # compiling every module in every process costs a minute
export TIMEFORMAT := %U + %S seconds of CPU time (user + system), %R seconds in all

# uv does not read pip's settings
UV = UV_FIND_LINKS="$(or $(PIP_FIND_LINKS),$(shell $(PYTHON) -m pip config get global.find-links 2>/dev/null))" \
	.venv/bin/uv pip install --quiet

.PHONY: help setup demo docs gpu check test test-slow test-lowest test-lowest-all dist clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: .venv/installed  ## create .venv with qwen-cache and qwen-train

.venv/uv: constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is required: make setup PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt uv
	@touch $@

.venv/installed: pyproject.toml constraints.txt .venv/uv
	$(UV) --python $(BIN)/python --constraint constraints.txt --editable '.[dev]'
	@touch $@

.venv/installed-demo: pyproject.toml constraints.txt .venv/uv
	@if test -e .venv/installed; then $(MAKE) --no-print-directory setup; else \
		echo "installing torch and what it needs: 1.6 GB on the disk with the CPU's build, some 5 GB with CUDA's"; \
		$(UV) --python $(BIN)/python --constraint constraints.txt --editable '.[all,demo]'; fi
	@touch $@

demo: .venv/installed-demo  ## every step on real photographs with a tiny model, on the CPU, in the folder demo/
	@PATH="$(CURDIR)/$(BIN):$$PATH" tools/demo.sh

docs: .venv/installed-docs  ## the documentation as a site, in the folder site/
	$(BIN)/python tools/make_reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.venv/installed-docs: .venv/installed
	$(UV) --python $(BIN)/python --constraint constraints.txt --editable '.[docs]'
	@touch $@

gpu: setup  ## measure this machine's GPU in at most 50 minutes, without a download; the report is in docs/gpu/
	$(BIN)/python tools/gpu_report.py

check: setup  ## linter, formatter, spelling, banned words, imports, types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/codespell
	$(BIN)/python tools/check_words.py
	$(BIN)/lint-imports
	$(BIN)/mypy

test: setup  ## make check, and the tests that take seconds
	@time { $(MAKE) --no-print-directory check && $(BIN)/pytest $(SPREAD) -m "not slow"; }

test-slow: setup  ## the tests that take minutes
	@time $(BIN)/pytest $(SPREAD) -m slow --slow-share $(SHARE)

test-lowest: .venv-lowest/installed  ## what uses other libraries, with the lowest stated version of each dependency
	$(LOWEST)/pytest $(SPREAD) -m "libraries and not slow" $(OLD)

test-lowest-all: .venv-lowest/installed  ## all tests that take seconds, with these versions
	$(LOWEST)/pytest $(SPREAD) -m "not slow" $(OLD)

.venv-lowest/installed: pyproject.toml constraints.txt .venv/uv
	$(PYTHON) -m venv .venv-lowest
	$(UV) --python $(LOWEST)/python --resolution lowest-direct --editable '.[dev]'
	@touch $@

dist: .venv/uv  ## the wheel and the sdist, checked, in the folder dist/
	$(BIN)/uv build --quiet
	$(BIN)/uv tool run twine check --strict dist/*

clean:  ## remove the files of the other targets
	rm -rf .venv .venv-lowest demo site dist docs/reference .mypy_cache .pytest_cache .ruff_cache .hypothesis \
		.simulated-device *.egg-info
