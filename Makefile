# make demo     build and train a small mixture-of-experts language model on two processes
# make test     install what testing needs, build, and run every test
# make lint     formatting, style, types and spelling
# make bench    time the operators beside their peers and rewrite docs/benchmarks.md
# make build    build the operators in place;  make compat: test that build under the oldest torch
# make cuda     build the CUDA operators too, print what each kernel uses; fails if one spills registers
# make gpu-check PYTHON=python    on a machine with a GPU: build, test, sanitize and measure with that Python as it is
# make gpu-report                 docs/gpu.md from what gpu-check found
# Everything but gpu-check installs into .venv, which is reused. Neither nvcc nor a GPU is needed for the rest; nvcc for
# make cuda.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
OLDEST_TORCH = 2.11.0
# Asked for when a recipe runs: torch is installed by then.
BUILD_DIR = build/cmake-$$($(BIN)/python -c 'import torch; print(torch.__version__)')
CPP_FILES = $(shell git ls-files '*.cpp' '*.h' '*.cu' '*.cuh')

.PHONY: demo test lint bench build compat cuda gpu-check gpu-report clean
.DELETE_ON_ERROR:

$(BIN)/python:
	$(PYTHON) -m venv $(VENV) || (echo "make: python3-venv is needed: apt-get install python3-venv" && false)

# The stamp carries the metadata it was made from: a changed pin installs again.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python tools/install.py
	touch $@

build: $(VENV)/.installed
	$(BIN)/pip install --quiet --no-build-isolation --no-deps --editable .
	@$(BIN)/python -m moe_ext info --brief

demo: build
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 examples/train_moe_lm.py --out runs/demo

test: $(VENV)/.installed
	tools/install_test_tools.sh
	MOE_EXT_TESTS=1 $(MAKE) build
	$(BIN)/ctest --test-dir $(BUILD_DIR) --verbose --parallel "$$(nproc)"
	$(BIN)/python -m pytest

# A library built against the development torch must serve every torch from the oldest supported one on.
compat: build
	test -x $(VENV)-oldest/bin/python || $(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/python tools/install.py --torch $(OLDEST_TORCH) pytest pytest-timeout hypothesis numpy
	PYTHONPATH=. $(VENV)-oldest/bin/python -m moe_ext info --brief
	$(VENV)-oldest/bin/python -m pytest tests/ops tests/nn tests/test_cuda_library.py tests/test_runtime_library.py tests/distributed/test_ring_exchange.py

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/codespell $$(git ls-files)
	$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)

# A peer that cannot be installed here is left out, and its columns hold dashes.
bench: build
	$(BIN)/python tools/install.py --extra bench || echo "make bench: not every peer could be installed"
	$(BIN)/python benchmarks/run.py

cuda: $(VENV)/.installed
	MOE_EXT_CUDA=1 $(MAKE) build
	$(BIN)/python tools/kernel_resources.py $(BUILD_DIR)

gpu-check:
	$(PYTHON) tools/gpu_check.py

gpu-report:
	$(PYTHON) tools/gpu_check.py --report docs/gpu.md

clean:
	rm -rf build moe_ext/_C.so moe_ext/_C_cuda.so moe_ext/_runtime.*.so
