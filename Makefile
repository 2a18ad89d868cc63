# `make` lists the targets. Each one first creates .venv, once, with Python 3.11, 3.12 or 3.13 and the package index.

VENV := .venv
RUNTIME := $(VENV)/.installed-runtime
DEV := $(VENV)/.installed-dev
WORKERS ?= 5

.DEFAULT_GOAL := help
.PHONY: help demo demo-stop test-fast test test-long check bench dist docs site format clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

demo: $(RUNTIME) ## deploy the iris example and ask it for a prediction
	@$(VENV)/bin/python scripts/demo.py

demo-stop: $(RUNTIME) ## stop what the demo left running
	@$(VENV)/bin/python scripts/demo.py --stop

test-fast: $(DEV) ## run the pure and in-process tests (one to two minutes, nothing else installed)
	@sh scripts/test fast

test: $(DEV) ## run the tests with real operators, gateways, replicas, S3, PostgreSQL and Ray (minutes)
	@sh scripts/test-services
	@sh scripts/test main $(WORKERS)

test-long: $(DEV) ## run the chaos, soak and cluster tests (as root)
	@sh scripts/test-services long
	@sh scripts/test long $(WORKERS)

check: $(DEV) ## lint, formatting, types, import order, documentation
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/python scripts/docs.py --check

bench: $(DEV) ## measure requests/s, latency and batch jobs against other systems (takes long)
	$(VENV)/bin/python -m benchmarks.batch
	$(VENV)/bin/python -m benchmarks

dist: $(DEV) ## build wheel, sdist and SBOM, and run the demo from the wheel
	@sh scripts/dist

docs: $(DEV) ## write the CLI reference and the JSON Schema from the code, check every link
	$(VENV)/bin/python scripts/docs.py

site: $(DEV) ## build the documentation as a site into build/site
	@sh scripts/site

format: $(DEV) ## format the code and fix what can be fixed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean: ## stop the demo, remove .venv and everything that was built
	@if [ -e build/demo ] && [ -x $(VENV)/bin/cortex ]; then CORTEX_HOME=build/demo $(VENV)/bin/cortex down; fi
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache benchmarks/.work
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUNTIME): pyproject.toml constraints.txt scripts/install
	@sh scripts/install runtime

$(DEV): pyproject.toml constraints.txt scripts/install
	@sh scripts/install dev
