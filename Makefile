# Everything goes through .venv, which is made on first use.
# Bytecode is wanted here: without it every process compiles every module anew.
unexport PYTHONDONTWRITEBYTECODE
unexport PYTHONUNBUFFERED

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.stamp

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format type bench matrix docs docs-serve package check

help: ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

setup: $(STAMP) ## Make .venv with everything that is needed

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable '.[dev]'
	touch $@

demo: $(STAMP) ## Train on real data with four workers, one of which is killed
	$(BIN)/python examples/train_digits.py --kill-rank 2 --kill-step 75

test: $(STAMP) ## Run all tests
	$(BIN)/python -m pytest

lint: $(STAMP) ## Check style, formatting and who imports whom
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

format: $(STAMP) ## Format the code
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

type: $(STAMP) ## Check the types
	$(BIN)/mypy

bench: $(STAMP) ## Measure, with the peers beside (minutes)
	$(BIN)/python -m benchmarks

matrix: $(STAMP) ## Test all promised versions, each in an environment of its own (an hour, 7 GB)
	$(BIN)/python -m matrix $(PAIRS)

docs: $(STAMP) ## Build the site (dead links fail), and check that it tells the truth about the code
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python -m pytest tests/unit/test_docs.py

docs-serve: $(STAMP) ## Show the site, and follow what is edited
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

package: $(STAMP) ## Build wheel and sdist, and try the wheel in an environment of its own
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python tests/try_package.py

check: lint type test docs demo ## What CI runs
