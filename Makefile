# `make demo` and `make test` work in a fresh clone with Python 3.10+ and make alone. Nothing is fetched after installation.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Test processes, one a core; each has its share of torch's threads.
WORKERS ?= auto
export PYTHONHASHSEED = 0

.PHONY: demo examples test test-fast test-long test-oldest test-newest check format docs dist benchmarks clean

$(VENV)/installed: setup.cfg constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: $(VENV)/installed
	$(BIN)/python examples/breast_cancer.py --output demo-output

# Every other example, with few draws: whether they run, and figures to look at.
examples: $(VENV)/installed
	$(BIN)/python examples/cox_processes.py --output examples-output --samples 30 --warmup 30 --cells 8
	$(BIN)/python examples/deep_kernel.py --output examples-output --steps 30
	$(BIN)/python examples/image_segmentation.py --output examples-output --train 150 --points 10 --samples 30
	$(BIN)/python examples/mnist.py --output examples-output --images 150 --points 15 --samples 10
	$(BIN)/python examples/svgp_made_bayesian.py --output examples-output --count 60 --steps 100 --samples 30
	$(BIN)/python examples/three_classes.py --output examples-output --count 60 --points 8 --samples 30
	$(BIN)/python examples/transcription.py --output examples-output --num-points 19 --num-samples 20 --warmup-steps 20 --num-chains 2

test: $(VENV)/installed
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not long"

test-fast: $(VENV)/installed
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow and not long"

# Repeats with other likelihoods, and a thousand random models against brute force: some hours, before a release. In pieces:
# make test-long ATTACK="--attack-first 40 --attack-models 100"
ATTACK ?= --attack-models 1000
test-long: $(VENV)/installed
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m long --attack-record attack-record $(ATTACK); \
	status=$$?; $(BIN)/python -m tests.attack.record attack-record docs/results/attack.md; exit $$status

# The fast suite with the oldest and the newest versions, each in an environment of its own (some GB: CUDA builds of torch), before a
# release: make test-oldest PYTHON=python3.10; make test-newest PYTHON=python3.13
$(VENV)-oldest/installed $(VENV)-newest/installed: $(VENV)-%/installed: setup.cfg constraints/%.txt
	$(PYTHON) -m venv $(VENV)-$*
	$(VENV)-$*/bin/python -m pip install --quiet --upgrade pip
	$(VENV)-$*/bin/python -m pip install --quiet -c constraints/$*.txt -e '.[arviz,plots]' pytest pytest-xdist
	touch $@

test-oldest test-newest: test-%: $(VENV)-%/installed
	$(VENV)-$*/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow and not long"

check: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal tests/test_import_floors.py torchgpmc

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

benchmarks: $(VENV)/installed
	$(BIN)/python benchmarks/hmc_overhead.py
	$(BIN)/python benchmarks/short_lengthscales.py
	$(BIN)/python benchmarks/sparse_gradient.py
	$(BIN)/python benchmarks/nuts_against_numpyro.py
	$(BIN)/python benchmarks/evidence.py
	$(BIN)/python benchmarks/paper_a_figure2.py
	$(BIN)/python benchmarks/effective_draws.py

# The site, offline once installed; notebooks are run and cached. MathJax comes from npm where there is one.
docs: $(VENV)/installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	-test -d docs/_mathjax || (mkdir docs/_mathjax && cd docs/_mathjax && npm pack --silent mathjax@3 && \
	tar -xzf mathjax-*.tgz --strip-components=2 package/es5 && rm mathjax-*.tgz) || rm -rf docs/_mathjax
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html

dist: $(VENV)/installed
	$(BIN)/python -m pip install --quiet build twine
	rm -rf dist
	$(BIN)/python -m build --quiet
	$(BIN)/python -m twine check --strict dist/*

clean:
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-newest demo-output build dist docs/_build docs/_mathjax docs/generated *.egg-info .pytest_cache .mypy_cache .ruff_cache
