# `make help` lists what there is.

SHELL := /bin/bash
VENV := .venv
FUZZ_EXAMPLES ?= 2000
RUN := PYTHONPATH="$(CURDIR)/runtime:$(CURDIR)" $(VENV)/bin
.DEFAULT_GOAL := help

.PHONY: help
help: ## what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## checks Python and Java, makes .venv, installs everything; quick when nothing changed
	@PYTHON="$(PYTHON)" scripts/setup.sh

.PHONY: demo
demo: setup ## runs the demonstration
	$(RUN)/python -m demo

.PHONY: check
check: setup ## checks what changed: style, types, the unit tests of the changed rooms
	@scripts/check.sh

.PHONY: test
test: setup ## runs all tests; PYTEST="-m 'not slow'" adds options
	@scripts/test.sh $(PYTEST)

.PHONY: test-long
test-long: setup ## runs the tests that the suite has no time for
	THOROUGH=1 $(VENV)/bin/python -m pytest -m long $(PYTEST)
	THOROUGH=1 $(VENV)/bin/python -m pytest --timeout=3600 $$(grep -rl 'tests.support.effort import' tests/property tests/simulation tests/unit) $(PYTEST)

.PHONY: coverage
coverage: setup ## lines and branches of the pure cores that their unit tests run, with a floor; OF="tests/unit" reports all code
	rm -rf .coverage && mkdir .coverage
	$(VENV)/bin/python -m coverage run -m pytest $(or $(OF),tests/unit/runtime/checkpoint tests/unit/runtime/scheduler) -q -p no:schemathesis --timeout=900
	$(VENV)/bin/python -m coverage combine --quiet
	$(VENV)/bin/python -m coverage report $(if $(OF),,--fail-under=96 --include='*/checkpoint/*,*/scheduler/*')

.PHONY: attack
attack: setup ## runs the attacks against real sessions, those that take minutes too
	$(VENV)/bin/python -m pytest tests/attack -m attack $(PYTEST)

.PHONY: chaos
chaos: setup ## random faults while a job runs; MINUTES=60 or FAULTS=50, SEED=1 for a certain run, SPARK=1 in Spark, KIND=kafka-to-delta
	$(RUN)/python -m tests.chaos --minutes $(or $(MINUTES),10) $(if $(FAULTS),--faults $(FAULTS)) $(if $(SEED),--seed $(SEED)) $(if $(KIND),--kind $(KIND)) $(if $(SPARK),--spark)

SIMULATE = --first $(or $(FIRST),0) --seeds $(or $(SEEDS),5000) $(if $(SHOW),--show $(SHOW))

.PHONY: simulate
simulate: setup ## runs simulated schedules; SIMULATION=protocols or jobs for one of both, SEEDS=100000 FIRST=0, SHOW=<seed> explains one
	$(if $(filter-out jobs,$(or $(SIMULATION),protocols)),$(RUN)/python -m tests.simulation protocols $(SIMULATE))
	$(if $(filter-out protocols,$(or $(SIMULATION),jobs)),$(RUN)/python -m tests.simulation jobs $(SIMULATE))

.PHONY: lint
lint: setup ## checks style and formatting
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

.PHONY: format
format: setup ## formats the code and repairs what can be repaired
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

.PHONY: types
types: setup ## checks the types
	$(RUN)/mypy

.PHONY: contracts
contracts: setup ## checks which room imports which
	$(RUN)/lint-imports --no-logo

.PHONY: docs
docs: setup ## writes the generated pages
	$(RUN)/python -m tests.support.options_page > docs/options.md
	$(RUN)/python -m tests.support.reference_pages docs/reference
	$(RUN)/python -m tests.support.parity > docs/functions.md
	$(RUN)/python -m tests.support.metrics_page > docs/metrics.md
	$(RUN)/python -m tests.support.rest_examples > runtime/ckpt_runtime/rest/examples.json

.PHONY: rows
rows: setup ## prints every row of the designs as proven or open, with its tests
	@$(VENV)/bin/python scripts/rows.py

.PHONY: parity
parity: setup ## computes the examples of Spark's functions in Spark and in the engine; prints which are equal or refused
	@$(RUN)/python -m tests.support.parity
	@PARITY_EXAMPLES=200 $(RUN)/python -m pytest -q -p no:schemathesis --timeout 7200 tests/differential/test_generated_expressions.py

.PHONY: fuzz
fuzz: setup ## long fuzz tests of the REST API; FUZZ_EXAMPLES=20000 says how long
	FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(VENV)/bin/python -m pytest tests/fuzz --show-capture=no $(PYTEST)

.PHONY: wheel
wheel: setup ## builds dist/*.whl: the provider and the engine
	$(VENV)/bin/python -m pip wheel --quiet --no-deps --wheel-dir dist ./runtime .

.PHONY: lock
lock: ## writes requirements/lock.txt from what is installed now
	scripts/write_lock.sh

.PHONY: clean
clean: ## deletes what was built, caches included; keeps .venv
	rm -rf build runtime/build dist .coverage .demo .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	rm -rf spark-warehouse metastore_db derby.log ./*.egg-info runtime/*.egg-info
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -print0 | xargs -0 rm -rf

.PHONY: clean-all
clean-all: clean ## deletes .venv as well
	rm -rf $(VENV)
