# `make demo` and `make test` work in a fresh clone with Python 3.10+ and make alone. Nothing is fetched after installation.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Test processes, one a core; each has its share of torch's threads.
WORKERS ?= auto
export PYTHONHASHSEED = 0

.PHONY: demo test test-fast test-long check format benchmarks clean

$(VENV)/installed: setup.cfg constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: $(VENV)/installed
	$(BIN)/python examples/breast_cancer.py --output demo-output

test: $(VENV)/installed
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test-fast: $(VENV)/installed
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow and not long"

# A thousand random models against brute force, some hours, and stated errors over hundreds of data sets, minutes. In pieces: make test-long ATTACK="--attack-first 40 --attack-models 100"
ATTACK ?= --attack-models 1000
test-long: $(VENV)/installed
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m long --attack-record attack-record $(ATTACK) tests/attack tests/importance; \
	status=$$?; $(BIN)/python -m tests.attack.record attack-record docs/results/attack.md; exit $$status

check: $(VENV)/installed
	$(BIN)/ruff check torchgpmc tests examples benchmarks
	$(BIN)/ruff format --check torchgpmc tests examples benchmarks
	$(BIN)/mypy
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal tests/test_import_floors.py torchgpmc

format: $(VENV)/installed
	$(BIN)/ruff check --fix torchgpmc tests examples benchmarks
	$(BIN)/ruff format torchgpmc tests examples benchmarks

benchmarks: $(VENV)/installed
	$(BIN)/python benchmarks/hmc_overhead.py
	$(BIN)/python benchmarks/short_lengthscales.py
	$(BIN)/python benchmarks/sparse_gradient.py
	$(BIN)/python benchmarks/nuts_against_numpyro.py
	$(BIN)/python benchmarks/evidence.py
	$(BIN)/python benchmarks/paper_a_figure2.py
	$(BIN)/python benchmarks/effective_draws.py

clean:
	rm -rf $(VENV) demo-output build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
