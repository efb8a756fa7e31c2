# Everything a newcomer needs: `make quickstart`, `make test`.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/.run-installed
DEV := $(VENV)/.dev-installed
SGLANG := .sglang-cpu

# A file's tests share what is made for them, so they go to one worker, and short files come last.
# `make test WORKERS=8` where there are more cores than two.
WORKERS ?= 2
PYTEST = OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 25

.PHONY: quickstart test nightly unit sglang-cpu lint types docs site blocks check soak clean

$(RUN): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

# pip would compile with one process. Some packages contain files for other versions of Python, which do not compile.
$(DEV): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --editable ".[dev]"
	$(VENV)/bin/python -W ignore -m compileall -qq -j 0 $(VENV)/lib src || true
	touch $(RUN) $@

# SGLang itself, for tests/real_sglang on machines without a GPU: beside the environment, whose versions are others.
$(SGLANG)/.installed: $(DEV) tests/real_sglang/requirements.txt
	rm -rf $(SGLANG)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(SGLANG) \
	  --requirement tests/real_sglang/requirements.txt
	touch $@

sglang-cpu: $(SGLANG)/.installed

quickstart: $(RUN)
	$(VENV)/bin/furlong quickstart

# Two tiers: `test` on each commit, and `nightly`, which adds the suites that take minutes (SGLang on a CPU, Ray,
# Megatron's layouts, chaos, examples) and a soak.
unit: $(DEV)
	$(PYTEST) tests/unit -m "not nightly"

test: $(DEV)
	$(PYTEST) -m "commit or not nightly"

nightly: lint types $(SGLANG)/.installed docs
	$(VENV)/bin/python scripts/run_docs.py --together README.md docs/start docs/guides
	$(PYTEST)
	$(MAKE) soak

lint: $(DEV)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/hadolint Dockerfile
	$(VENV)/bin/oxlint --deny-warnings --quiet src/furlong/view/static docs/flag_filter.js

types: $(DEV)
	$(VENV)/bin/pyright

# The site is built offline into site/, where a broken link is an error.
site: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict --quiet

# The code blocks of all pages.
blocks: $(DEV)
	$(VENV)/bin/python scripts/run_docs.py README.md docs

docs: site blocks

# A run under random faults, with the growth of memory and descriptors: `make soak MINUTES=120`.
MINUTES ?= 30
soak: $(DEV)
	$(VENV)/bin/python scripts/soak.py --minutes $(MINUTES)

check: lint types test docs

clean:
	rm -rf $(VENV) $(SGLANG) build dist site src/furlong_rl.egg-info
