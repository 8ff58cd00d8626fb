# make demo: train and compare, ends in demo/report.html.   make test: the test suite.   make docs: the site, in site/.
# All set up .venv themselves.

PYTHON ?= python3
BIN := .venv/bin
# The build of torch for CPUs, without the gigabytes of CUDA, is taken where there is no GPU.
# Another place: make demo TORCH_INDEX=https://...   the usual build: make demo TORCH_INDEX=
TORCH_INDEX ?= $(if $(shell command -v nvidia-smi rocm-smi),,https://download.pytorch.org/whl/cpu)
PIP := $(BIN)/python -m pip --disable-pip-version-check install --constraint constraints.txt

.PHONY: demo test test-gpu bench lint docs format mutants fuzz edge-test zoo kernels space clean
.DELETE_ON_ERROR:

demo: .venv/demo-installed
	@echo "Ten small runs, then a report in demo/report.html. The first numbers come in half a minute."
	@$(BIN)/lrfdyn reproduce --out demo

test: .venv/dev-installed
	$(BIN)/python -m pytest -n 2 --dist worksteal -q

# What needs or profits from a GPU. The last line says what ran, and on what.
test-gpu: .venv/dev-installed
	$(BIN)/python -m pytest -m gpu -n 6 --dist worksteal -q

# On a GPU: the tables of docs/performance.md, peers included, all of one revision. Goes on where it was interrupted.
bench: .venv/dev-installed
	$(BIN)/python benchmarks/all.py

lint: .venv/dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

docs: .venv/docs-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/python docs/live.py site/demo

format: .venv/dev-installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# An hour: which small changes of the package no test notices.
mutants: .venv/dev-installed
	$(BIN)/python tests/mutants.py

# Half an hour: ten thousand wrong calls, recipes, files, command lines, faults and signals, and of the C engine.
fuzz: .venv/dev-installed
	$(BIN)/python tests/fuzz.py --cases 10000
	$(BIN)/python tests/fuzz_engine.py --cases 20000

# Two minutes: the digits model as C on emulated microcontrollers and 64-bit Arm, where their tools are installed.
edge-test: .venv/demo-installed
	$(BIN)/python benchmarks/edge_boards.py

# Folders of the trained models for the Hugging Face hub, in build/zoo: nothing is uploaded.
zoo: .venv/dev-installed
	$(BIN)/python benchmarks/zoo.py build build/zoo

# The kernels as a package of Hugging Face's `kernels` project, in build/kernels: nothing is uploaded.
kernels:
	$(PYTHON) benchmarks/kernel_package.py build/kernels

# A folder for a space of the Hugging Face hub, in build/space: the page, the package and its weights.
SPACE ?= build/space
space:
	rm -rf $(SPACE)
	mkdir -p $(SPACE)
	cp -r examples/space/. examples/photos/raccoon.jpg lrfdyn weights pyproject.toml $(SPACE)
	find $(SPACE) -name __pycache__ -prune -exec rm -r {} +

clean:
	rm -rf .venv demo site build *.egg-info

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lrfdyn needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv
	$(if $(TORCH_INDEX),-$(PIP) --retries 0 --no-deps --index-url $(TORCH_INDEX) torch \
	  || echo "No torch for CPUs from $(TORCH_INDEX); the usual one is taken.")

.venv/demo-installed: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) --editable '.[analysis,digits,train]'
	touch $@

# SpikingJelly and snnTorch are peers to compare with; what they declare to need beyond this is not needed for that.
.venv/dev-installed: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps spikingjelly loguru h5py snntorch nirtorch
	touch .venv/demo-installed $@

.venv/docs-installed: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) --editable '.[docs]'
	touch $@
