# `make test` and `make demo` each work alone on a fresh clone; all they need is Python 3.11+ and Java 17+.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo test lint bench endurance soak replay replay-fault lock clean distclean run-env dev-env

SEEDS ?= 1000
SEED ?= 0
DELIVERY ?= both
MINUTES ?= 30
ARGS ?=
BIN := .venv/bin

help: ## what can be made
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 22

demo: run-env ## see lanes at work: a broker, a load and an app, on this machine
	@$(BIN)/keylane demo

test: lint ## lint, types, unit tests, integration tests (under 15 minutes)
	$(BIN)/python -m pytest tests/unit -n auto
	$(BIN)/python -m pytest tests/integration

lint: dev-env ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src tests $(wildcard bench examples)

bench: dev-env ## measure throughput and latency beside the peers (ARGS="--quick --only drain,chat")
	$(BIN)/python -m bench $(ARGS)
ifeq ($(ARGS),)
	$(BIN)/python -m bench.blocked
	$(BIN)/python -m bench.skew
	$(BIN)/python -m bench.telemetry
endif

endurance: dev-env ## half an hour at half load with failures: does anything grow? (MINUTES=30)
	$(BIN)/python -m bench.endurance --minutes $(MINUTES)

soak: dev-env ## the long campaigns: random cases, many seeds, faults (SEEDS=1000)
	KEYLANE_HYPOTHESIS=explore $(BIN)/python -m pytest tests/unit --deselect tests/unit/test_schedules.py
	KEYLANE_SEEDS=$(SEEDS) $(BIN)/python -m pytest tests/unit/test_schedules.py --session-timeout=86400
	$(BIN)/python -m pytest -m slow --timeout=3600 --session-timeout=86400
	KEYLANE_RECUTS=10 KEYLANE_RACES=50 $(BIN)/python -m pytest --session-timeout=86400 \
	    tests/integration/test_ranges.py tests/integration/test_global.py
	# A fault takes as long as a hundred schedules: a hundredth of the seeds of each, and a tenth of them as pairs.
	PYTHONPATH=tests $(BIN)/python -m campaign --delivery $(DELIVERY) \
	    --seeds $$(( ($(SEEDS) + 99) / 100 )) --pairs $$(( ($(SEEDS) + 9) / 10 ))

replay: dev-env ## one seed of the random schedules, with its timeline (SEED=7)
	KEYLANE_SEED=$(SEED) $(BIN)/python -m pytest tests/unit/test_schedules.py -vv --log-cli-level=INFO

replay-fault: dev-env ## one seed of the fault campaign, with its story (SEED=701)
	PYTHONPATH=tests $(BIN)/python -m campaign --seed $(SEED) --delivery $(DELIVERY)

lock: ## pin the newest allowed versions of everything (needs uv)
	@for name in requirements-build requirements requirements-dev; do \
	    uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-annotate \
	        --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" \
	        --output-file $$name.lock $$name.in || exit; \
	done

clean: ## remove what tools and runs left behind
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis spark-warehouse metastore_db derby.log artifacts
	find . -path './.venv*' -prune -o \( -name __pycache__ -o -name '*.egg-info' \) -prune -exec rm -rf {} +

distclean: clean ## that, and .venv
	rm -rf .venv .venv.*

# Each checks Python and Java first, and is quick when nothing changed.
run-env:
	@scripts/bootstrap run

dev-env:
	@scripts/bootstrap dev
