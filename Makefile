# Every target sets up what it needs. `make help` lists targets.

PYTHON ?= python3
VENV ?= .venv
# Further options for pytest: make test PYTEST_ARGS="-k combine -x"
PYTEST_ARGS ?=
# Processes that `make test` and `make test-all` run test files in; 0: none beside pytest's own, as --pdb needs.
TEST_JOBS ?= 2
# The extra of jax to install: cuda13 if there is an NVIDIA GPU, otherwise none.
JAX_EXTRA ?= $(if $(shell nvidia-smi -L 2>/dev/null),cuda13)
# Whether to build the CUDA kernels: ON, OFF or AUTO, which is ON if there is an NVIDIA driver.
# After a change, `make clean` first.
CUDA ?= AUTO
# Interpreters for `make matrix` and `make wheels`: names on PATH, or paths. Default: pythonX.Y on PATH and in pyenv.
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
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 20

# Creates a virtual environment that is not there or has no pip: where Debian's python3-venv is
# missing, `python3 -m venv` fails and leaves such a one.
define create_venv
	test -x $(1)/bin/pip || { \
	  $(PYTHON) tools/check_python.py $(PYTHON) && $(PYTHON) -m venv $(1); }
endef

# --- set-up -----------------------------------------------------------------------------

# Everything except the package. Includes the build tools, so that the extensions build without
# isolation, and thus incrementally.
$(VENV)/.deps: pyproject.toml tools/requirements.py tools/cuda_compiler.py
	$(call create_venv,$(VENV))
	$(BIN)/python tools/requirements.py dev > $(VENV)/requirements.txt
	$(BIN)/python tools/requirements.py --cuda $(CUDA) > $(VENV)/requirements-cuda.txt
	$(BIN)/python tools/requirements.py --cuda-toolkit $(CUDA) >> $(VENV)/requirements.txt
	$(BIN)/pip install --quiet -r $(VENV)/requirements.txt cmake ninja \
	  $(if $(JAX_EXTRA),'jax[$(JAX_EXTRA)]')
	$(BIN)/pip install --quiet --no-deps -r $(VENV)/requirements-cuda.txt
	touch $@

# The package, editable: only changes under ffi/ need a rebuild.
$(VENV)/.package: $(VENV)/.deps CMakeLists.txt $(FFI_SOURCES)
	@echo "Building the extensions: one minute, or six with the CUDA kernels."
	$(BIN)/pip install --quiet --no-deps --no-build-isolation \
	  --config-settings cmake.define.JAX_EP_CUDA=$(CUDA) --editable .
	touch $@

.PHONY: setup
setup: $(VENV)/.package  ## create .venv with the package and all tools

# --- daily use --------------------------------------------------------------------------

.PHONY: demo
demo: $(VENV)/.package  ## train a small mixture-of-experts model, on GPUs if there are any
	$(BIN)/python examples/demo $(DEMO_ARGS)

PYTEST := $(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile --max-worker-restart 0
.PHONY: test
test: $(VENV)/.package  ## run each test, but not with all combinations of parameters, in ten minutes
	$(PYTEST) --quick $(PYTEST_ARGS)

.PHONY: test-all
test-all: $(VENV)/.package  ## run all tests, in up to an hour; print why tests were skipped
	$(PYTEST) $(PYTEST_ARGS)

.PHONY: bench
bench: $(VENV)/.package  ## run the benchmark, on GPUs if there are any, otherwise on the CPU
	$(BIN)/python benchmarks $(BENCH_ARGS)

.PHONY: format
format: $(VENV)/.deps  ## rewrite all sources in the project's format
	$(BIN)/ruff check --quiet --fix-only $(PY_DIRS)
	$(BIN)/ruff format --quiet $(PY_DIRS)
	$(BIN)/clang-format -i $(CXX_FILES)

.PHONY: lint lint-python lint-cpp lint-types lint-imports lint-includes lint-streams lint-peers \
  lint-sizes
lint: lint-python lint-cpp lint-types lint-imports lint-includes lint-sizes  ## check format, types, layers, sizes

lint-python: $(VENV)/.deps
	$(BIN)/ruff check $(PY_DIRS)
	$(BIN)/ruff format --check $(PY_DIRS)

lint-cpp: $(VENV)/.deps
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

lint-types: $(VENV)/.deps
	$(BIN)/mypy

# Files of tests share what is in tests/support alone.
lint-imports: $(VENV)/.deps
	$(BIN)/lint-imports
	! grep -rnE --include='*.py' '\b(from|import) +test_' tests

# The folders of ffi/ follow their layers; kernels and ffi/core do not depend on XLA or Python.
lint-includes: lint-streams lint-peers
	$(PYTHON) tools/check_layers.py
	! grep -nE '#[[:space:]]*include[[:space:]]*[<"](xla/|nanobind/|Python\.h)' \
	  $$(find ffi \( -name '*.cu' -o -name '*.cuh' -o -path 'ffi/core/*' \) -type f)

# The extensions use no streams (ffi/exports.cmake), although XLA's headers include them.
STREAM_HEADERS := fstream|iomanip|ios|iosfwd|iostream|istream|locale|ostream|regex|sstream|streambuf
lint-streams:
	! grep -rnE --exclude-dir=tests \
	  '#[[:space:]]*include[[:space:]]*<($(STREAM_HEADERS))>|std::(cerr|clog|cout|[a-z]*stream)\>' ffi

# Other ranks' memory is reached in few files.
lint-peers:
	$(PYTHON) tools/check_peer_access.py .

# Files of at most 400 lines, functions of at most 60.
lint-sizes: $(VENV)/.deps
	$(BIN)/python tools/check_sizes.py

# Needs neither the package nor what it needs: sources are read, not imported.
DOCS_BIN := $(VENV)-docs/bin
$(VENV)-docs/.deps: tools/locks/docs.txt
	$(call create_venv,$(VENV)-docs)
	$(DOCS_BIN)/pip install --quiet --require-hashes -r tools/locks/docs.txt
	touch $@

# Without --quiet, which hides warnings from --strict.
.PHONY: docs
docs: $(VENV)-docs/.deps  ## build the documentation into build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 PATH="$(abspath $(DOCS_BIN)):$$PATH" mkdocs build --strict
	@echo "Open build/site/index.html."

# --- occasional use ---------------------------------------------------------------------

.PHONY: sanitize
sanitize: $(VENV)/.deps  ## test the host transport under ASan + UBSan, then TSan
	tests/sanitizers/run.sh $(VENV)

.PHONY: matrix
matrix:  ## build wheels, run the fast tests with several versions of Python and JAX
	PYTHONS="$(PYTHONS)" tools/matrix.sh $(MATRIX)

.PHONY: frameworks
frameworks: $(VENV)/.package  ## train tiny models with MaxText and with Levanter, with jax_ep in their layers
	PYTHONS="$(PYTHONS)" tools/frameworks.sh $(VENV) $(PYTEST_ARGS)

.PHONY: wheels
wheels:  ## build the wheels that users get, with the CUDA kernels, and test them; in dist
	PYTHONS="$(PYTHONS)" tools/wheels.sh

.PHONY: wheel-cpu
wheel-cpu: $(VENV)/.deps  ## build a wheel for CPUs alone, with the Python of .venv; in dist
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist \
	  --config-settings cmake.define.JAX_EP_CUDA=OFF .

.PHONY: cuda-compile
cuda-compile:  ## compile all CUDA sources; needs no GPU
	tools/cuda_compile.sh

.PHONY: static-libstdcxx
static-libstdcxx: $(VENV)/.package  ## test the extensions with a libstdc++ of their own
	$(BIN)/python tools/static_libstdcxx.py

.PHONY: gpu-programs
gpu-programs: $(VENV)/.package  ## compile programs with XLA for GPUs and check them; needs no GPU
	tools/gpu_programs.sh $(VENV) $(PYTEST_ARGS)

.PHONY: gpu-test
gpu-test:  ## on a machine with GPUs: build with its python3, test p2p; logs in GPU_LOGS
	tools/gpu_test.sh $(or $(GPU_LOGS),build/gpu-logs)

.PHONY: gpu-bench
gpu-bench:  ## on a machine with GPUs: build with its python3, measure p2p; files in GPU_LOGS
	tools/gpu_bench.sh $(or $(GPU_LOGS),build/gpu-logs) $(BENCH_ARGS)

.PHONY: clean
clean:  ## remove everything that the other targets created
	rm -rf $(VENV) $(VENV)-docs .venv-matrix .venv-frameworks-* build dist demo_out pretrain_out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
