# `make test` and `make demo` both work on a fresh clone. They need only Python 3.11+ and Java 17+.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo test lint bench endurance soak replay replay-fault lock clean distclean run-env dev-env

SEEDS ?= 1000
SEED ?= 0
DELIVERY ?= both
MINUTES ?= 30
ARGS ?=
BIN := .venv/bin
# Integration tests that measure or wait for what a busy machine delays: they run alone.
ALONE := test_campaign.py test_cli_run.py test_console.py test_epochs.py test_move_gaps.py test_skew.py

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 22

demo: run-env ## run a demo on this machine: broker, load, app, and a check of the results (ARGS=--secure)
	@$(BIN)/keylane demo $(ARGS)

test: lint ## lint, type checks, unit tests, integration tests 
	$(BIN)/python -m pytest tests/unit -n auto
	@# Download and prepare Kafka first: tests have a time limit.
	@$(BIN)/python -c 'from keylane.broker.kit import ensure_kit; ensure_kit()'
	@# A browser for the console's tests; says so loudly if there is none.
	@PYTHONPATH=tests $(BIN)/python -m support.browser
	$(BIN)/python -m pytest tests/integration -n 3 --dist loadfile $(addprefix --ignore=tests/integration/,$(ALONE))
	$(BIN)/python -m pytest $(addprefix tests/integration/,$(ALONE))

lint: dev-env ## check style, types and imports (ruff, mypy, import-linter)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src tests $(wildcard bench examples tools)
	$(BIN)/lint-imports --no-cache

bench: dev-env ## measure throughput and latency, and compare with the peers (ARGS="--quick --only drain,chat")
	$(BIN)/python -m bench $(ARGS)
ifeq ($(ARGS),)
	$(BIN)/python -m bench.blocked
	$(BIN)/python -m bench.skew
	$(BIN)/python -m bench.pauses
	$(BIN)/python -m bench.telemetry
endif

endurance: dev-env ## run at half load with failures and report anything that grows (MINUTES=30)
	$(BIN)/python -m bench.endurance --minutes $(MINUTES)

soak: dev-env ## run the long tests: random cases, many seeds, faults (SEEDS=1000)
	KEYLANE_HYPOTHESIS=explore $(BIN)/python -m pytest tests/unit --deselect tests/unit/testing/test_schedules.py
	PYTHONPATH=tests:tools $(BIN)/python -m schedules --seeds $(SEEDS)
	$(BIN)/python -m pytest -m slow --timeout=3600 --session-timeout=86400
	KEYLANE_RECUTS=10 KEYLANE_RACES=50 $(BIN)/python -m pytest --session-timeout=86400 \
	    tests/integration/test_ranges.py tests/integration/test_global.py
	# A fault takes as long as 100 schedules, so each fault gets 1/100 of the seeds, and pairs of faults 1/10.
	PYTHONPATH=tests:tools $(BIN)/python -m campaign --delivery $(DELIVERY) \
	    --seeds $$(( ($(SEEDS) + 99) / 100 )) --pairs $$(( ($(SEEDS) + 9) / 10 ))

replay: dev-env ## run one seed of the random schedules, with its timeline (SEED=7)
	KEYLANE_SEED=$(SEED) $(BIN)/python -m pytest tests/unit/testing/test_schedules.py -vv --log-cli-level=INFO

replay-fault: dev-env ## run one seed of the fault campaign, with its story (SEED=701)
	PYTHONPATH=tests:tools $(BIN)/python -m campaign --seed $(SEED) --delivery $(DELIVERY)

lock: ## pin the newest allowed versions of all requirements (needs uv)
	@for name in requirements-build requirements requirements-dev; do \
	    uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-annotate \
	        --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" \
	        --output-file $$name.lock $$name.in || exit; \
	done

clean: ## delete files made by tools and runs
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis spark-warehouse metastore_db derby.log artifacts
	find . -path './.venv*' -prune -o \( -name __pycache__ -o -name '*.egg-info' \) -prune -exec rm -rf {} +

distclean: clean ## the same, and delete .venv
	rm -rf .venv .venv.*

# Create or update .venv. Each checks Python and Java first, and is quick when nothing changed.
run-env:
	@scripts/bootstrap run

dev-env:
	@scripts/bootstrap dev
