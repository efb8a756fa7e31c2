# Everything a newcomer needs: `make quickstart`, `make test`.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/.run-installed
DEV := $(VENV)/.dev-installed

# A file's tests share what is made for them, so they go to one worker, and short files come last.
# `make test WORKERS=8` where there are more cores than two.
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: quickstart test unit lint types docs check clean

$(RUN): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(DEV): $(RUN) pyproject.toml
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

quickstart: $(RUN)
	$(VENV)/bin/furlong quickstart

test: $(DEV)
	$(PYTEST)

unit: $(DEV)
	$(PYTEST) tests/unit

lint: $(DEV)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(DEV)
	$(VENV)/bin/pyright

docs: $(DEV)
	$(VENV)/bin/python scripts/run_docs.py README.md docs

check: test lint types docs

clean:
	rm -rf $(VENV) build dist src/furlong.egg-info
