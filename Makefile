# Python 3.11 to 3.13 that makes the environment, and where the environment lies.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKDIR ?= runs/tiny
PARTS ?= mixer,decode,data,trainer

.PHONY: demo test test-fast test-thorough test-slow test-compiled lint release-check notebook bench bench-gate bench-checkpoints kernel-report scaling mqar text docs clean

# Trains the tiny model on real text, then evaluates it.
demo: $(VENV)/run
	$(BIN)/python train.py --config=configs/tiny.py --workdir=$(WORKDIR)
	$(BIN)/python eval.py --workdir=$(WORKDIR)

# Every test, the property tests with few examples. Workers take over whole stretches of the list, so that what a file
# compiles once is seldom compiled by both.
test: $(VENV)/dev
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n 2 --dist worksteal

# The subset that CI repeats under the newest Python and jax.
test-fast: $(VENV)/dev
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n 2 --dist worksteal -m fast

# The property tests with many more examples: an hour or more.
test-thorough: $(VENV)/dev
	JAX_PLATFORMS=cpu HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest -n 2 --dist worksteal

# The tests that take gigabytes of memory or many minutes.
test-slow: $(VENV)/dev
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -m slow

# The tests that compile for accelerators that are not there. They are best in an environment of their own, VENV=.venv-compilers:
# with their packages in it, jax looks for a TPU and a GPU each time it starts.
test-compiled: $(VENV)/dev $(VENV)/compilers
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n 2 --dist worksteal -m compiled

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

# Builds the source distribution, from it the wheel, and uses that in a new environment with nothing else in it: two minutes.
# A list of files that an earlier build left would hide what the wheel lacks.
release-check: $(VENV)/dev
	rm -rf dist *.egg-info $(VENV)-wheel
	$(BIN)/python -m build --quiet
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv $(VENV)-wheel
	$(VENV)-wheel/bin/python -m pip install --quiet --disable-pip-version-check dist/*.whl
	JAX_PLATFORMS=cpu $(VENV)-wheel/bin/python -I tests/use_wheel.py

# A few minutes on two CPU cores, and a new start each time.
notebook: $(VENV)/dev
	rm -rf runs/walkthrough
	JAX_PLATFORMS=cpu $(BIN)/jupyter-execute --inplace examples/walkthrough.ipynb

# Writes benchmarks/RESULTS.md: a quarter of an hour on two CPU cores, which should be doing nothing else. PARTS=mixer,data
# measures these alone. mlstm-kernels asks for torch, which its form in plain JAX does not use.
bench: $(VENV)/bench
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps mlstm-kernels==2.0.6
	$(BIN)/python -m benchmarks.results --parts=$(PARTS)

# Ratios of times against the bounds in benchmarks/gate.json: a minute, with the machine otherwise quiet.
bench-gate: $(VENV)/dev
	JAX_PLATFORMS=cpu $(BIN)/python -m benchmarks.gate

# A few minutes on two CPU cores.
bench-checkpoints: $(VENV)/dev
	JAX_PLATFORMS=cpu $(BIN)/python -m benchmarks.checkpointing

# Needs the same environment as test-compiled.
kernel-report: $(VENV)/dev $(VENV)/compilers
	JAX_PLATFORMS=cpu $(BIN)/python -m benchmarks.kernel_report

# In the same environment too; minutes for each row.
scaling: $(VENV)/dev $(VENV)/compilers
	JAX_PLATFORMS=cpu $(BIN)/python -m benchmarks.scaling

# Half an hour on two CPU cores with other work on them, less alone.
mqar: $(VENV)/dev
	JAX_PLATFORMS=cpu $(BIN)/python -m experiments.mqar

# What the results do not have yet: five hours in all on two CPU cores, in as many pieces as you like.
text: $(VENV)/dev
	JAX_PLATFORMS=cpu $(BIN)/python -m experiments.text

# The pages of docs/ as a site, in build/docs. A warning is an error.
docs: $(VENV)/dev $(VENV)/docs
	JAX_PLATFORMS=cpu $(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -b html docs build/docs

clean:
	rm -rf $(VENV) $(VENV)-wheel build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/run: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements.txt
	touch $@

$(VENV)/dev $(VENV)/bench $(VENV)/compilers $(VENV)/docs: $(VENV)/%: $(VENV)/run pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	touch $@
