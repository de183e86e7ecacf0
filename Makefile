# Every target sets up what it needs. `make help` lists them.

PYTHON ?= python3
VENV ?= .venv
# More options for pytest: make test PYTEST_ARGS="-k combine -x"
PYTEST_ARGS ?=
# Of jax: with a GPU, JAX for CUDA.
JAX_EXTRA ?= $(if $(shell nvidia-smi -L 2>/dev/null),cuda13)
# Interpreters for `make matrix`: names on PATH or paths. Empty: looked for by version.
PYTHONS ?=

export PIP_DISABLE_PIP_VERSION_CHECK := 1
unexport PYTHONPATH PYTHONHOME

BIN := $(VENV)/bin
FFI_SOURCES := $(shell find ffi -type f 2>/dev/null)
CXX_FILES = $(shell find ffi tests tools -type f \
  \( -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh' \))
PY_DIRS := $(wildcard jax_ep tests examples benchmarks tools)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 16

# --- set-up ---------------------------------------------------------------------------

# Everything but the extension. The build tools are installed too, so that the extension
# builds without isolation: incrementally, in seconds.
$(VENV)/.deps: pyproject.toml tools/requirements.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python tools/requirements.py dev > $(VENV)/requirements.txt
	$(BIN)/pip install --quiet -r $(VENV)/requirements.txt cmake ninja \
	  $(if $(JAX_EXTRA),'jax[$(JAX_EXTRA)]')
	touch $@

# The package, editable: Python changes need no rebuild, changes under ffi/ do.
$(VENV)/.package: $(VENV)/.deps CMakeLists.txt $(FFI_SOURCES)
	@echo "Building the extensions: a minute, or three with nvcc."
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

.PHONY: setup
setup: $(VENV)/.package  ## create .venv with the package and all tools

# --- daily ----------------------------------------------------------------------------

.PHONY: demo
demo: $(VENV)/.package  ## train a small mixture-of-experts model, on GPUs if there are some
	$(BIN)/python examples/demo $(DEMO_ARGS)

.PHONY: test
test: $(VENV)/.package  ## run the test suite; prints why a test was skipped
	$(BIN)/python -m pytest $(PYTEST_ARGS)

.PHONY: bench
bench: $(VENV)/.package  ## run the benchmark of what JAX has here: CPU or GPUs
	$(BIN)/python benchmarks $(BENCH_ARGS)

.PHONY: format
format: $(VENV)/.deps  ## rewrite all sources in the project's format
	$(BIN)/ruff check --quiet --fix-only $(PY_DIRS)
	$(BIN)/ruff format --quiet $(PY_DIRS)
	$(BIN)/clang-format -i $(CXX_FILES)

.PHONY: lint lint-python lint-cpp lint-types lint-rules
lint: lint-python lint-cpp lint-types lint-rules  ## check format, types and layering

lint-python: $(VENV)/.deps
	$(BIN)/ruff check $(PY_DIRS)
	$(BIN)/ruff format --check $(PY_DIRS)

lint-cpp: $(VENV)/.deps
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

lint-types: $(VENV)/.deps
	$(BIN)/mypy

lint-rules:
	tools/lint_rules.sh

# --- now and then -----------------------------------------------------------------------

.PHONY: sanitize
sanitize: $(VENV)/.deps  ## host transport under ASan + UBSan, then TSan
	tests/sanitizers/run.sh $(VENV)

.PHONY: matrix
matrix:  ## wheels, the fast tests, several versions of Python and JAX
	PYTHONS="$(PYTHONS)" tools/matrix.sh $(MATRIX)

.PHONY: cuda-compile
cuda-compile:  ## compile all CUDA sources, as far as there are any
	tools/cuda_compile.sh

.PHONY: gpu-programs
gpu-programs: $(VENV)/.package  ## without a GPU: compile programs for GPUs, look at them
	tools/gpu_programs.sh $(VENV) $(PYTEST_ARGS)

.PHONY: gpu-test
gpu-test:  ## on a machine with GPUs: build as it is, run the suite on p2p, logs in GPU_LOGS
	tools/gpu_test.sh $(or $(GPU_LOGS),build/gpu-logs)

.PHONY: gpu-bench
gpu-bench:  ## on a machine with GPUs: build as it is, run the GPU benchmark, files in GPU_LOGS
	tools/gpu_bench.sh $(or $(GPU_LOGS),build/gpu-logs) $(BENCH_ARGS)

.PHONY: clean
clean:  ## remove everything that the other targets wrote
	rm -rf $(VENV) .venv-matrix build dist demo_out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
