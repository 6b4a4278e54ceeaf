# make demo     build and train a small mixture-of-experts language model on two processes
# make test     install what testing needs, build, and run every test
# make test-fast    the daily loop: loops in C++, operators (CUDA emulated) and layers of one process, in under two minutes
# make test-full    every combination of parameters, ten times the fuzzing, the oldest and the newest torch, mutants
# make docs     the pages of docs/ and a reference from the docstrings as a site in build/docs
# make docs-check   links of that site, and its look in a browser where chromium is installed
# make lint     formatting, style, words, types and spelling
# make bench    time the operators beside their peers and rewrite docs/benchmarks.md
# make build    build the operators in place
# make compat   test that build under the oldest torch;  make compat-newest: under the newest
# make frameworks    test trainers with the oldest Accelerate, transformers, Lightning and PEFT that are served, and the newest
# make cuda     install the package with CUDA operators beside the oldest torch, whose build has CUDA, into build/installed,
#               test it there, and print what each kernel uses; fails if one spills registers, loads shared memory that
#               it does not write, or uses tensor cores with generic accesses
# make wheel    sdist and wheel of HEAD in dist/, the wheel from the sdist; MOE_EXT_CUDA=1 for one with the CUDA operators
# make wheel-check    install that wheel beside the oldest, this and the newest torch, and train there on two ranks
# make gpu-check PYTHON=python    on a machine with a GPU: build, test, sanitize and measure with that Python as it is;
#               OUT names the folder of the JSON, for this and for gpu-report
# make gpu-tune PYTHON=python     there, times alternatives beside each other and writes which won
# make gpu-report                 docs/gpu.md from what gpu-check and gpu-tune found
# Everything but gpu-check and gpu-tune installs into .venv, which is reused. Neither nvcc nor a GPU is needed for the rest; nvcc for
# make cuda.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
OLDEST = $(abspath $(VENV))-oldest
INSTALLED = $(CURDIR)/build/installed
OLDEST_TORCH = 2.11.0
NEWEST_TORCH = 2.15.0
# setuptools: with the module pkg_resources, which the oldest Lightning imports.
OLDEST_FRAMEWORKS = accelerate==1.15.0 transformers==5.19.0 lightning==2.5.0 peft==0.21.0 setuptools==75.8.0
NEWEST_FRAMEWORKS = accelerate transformers lightning peft
FRAMEWORK_TESTS = $(addprefix tests/distributed/test_,clipping_matrix.py composition.py lightning.py nothing_replaced.py) \
	$(addprefix tests/integrations/huggingface/test_,adapters.py ring_models.py saving.py trainer.py) \
	$(addprefix tests/integrations/huggingface/test_hybrid_models.py::test_,ranks mixers_refuse_a_cache_of_states)
# One worker a core; tests of one file share ranks, and so a worker. Files in the order of tests/marks.py, dearest first.
PYTEST = $(BIN)/python -m pytest
WORKERS = --numprocesses=auto --maxprocesses=8 --dist=loadfile --no-loadscope-reorder
# The files of all tests that run alone; tests/test_marks.py compares.
SERIAL = $(addprefix tests/compression/test_,collective_failures.py cost_model.py)
# Asked for when a recipe runs: torch is installed by then.
BUILD_DIR = build/cmake-$$($(BIN)/python -c 'import torch; print(torch.__version__)')
# The last lines of `make test`: what a machine without GoogleTest or valgrind did not run.
SAY_WHAT_WAS_LEFT_OUT = $(BIN)/ctest --test-dir $(BUILD_DIR) -N | grep -q "Total Tests: 0" && \
	echo "make test: without the tests in C++: GoogleTest is not installed and could not be downloaded (Debian's libgtest-dev)"; \
	command -v valgrind >/dev/null || echo "make test: without the instruction counts: valgrind is not installed"
# Kept even where the environment forbids it: tests start hundreds of interpreters, and without it each of them would
# compile what it imports of torch and transformers, for six seconds.
export PYTHONDONTWRITEBYTECODE =
# A compiler newer than those of the project may know further warnings: they end no user's build.
export MOE_EXT_WERROR = 1
CPP_FILES = $(shell git ls-files '*.cpp' '*.h' '*.cu' '*.cuh')

.PHONY: demo test test-built test-fast test-full docs docs-check lint style types bench build compat compat-newest frameworks oldest newest cuda wheel wheel-check gpu-check gpu-tune gpu-report clean
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
	$(MAKE) test-built

# Of a build with MOE_EXT_TESTS=1.
test-built:
	$(BIN)/ctest --test-dir $(BUILD_DIR) --output-on-failure --parallel "$$(nproc)"
	$(PYTEST) -m serial $(SERIAL)
	$(PYTEST) $(WORKERS) --durations=25 -m "not serial"
	@$(SAY_WHAT_WAS_LEFT_OUT)

test-fast: $(VENV)/.installed
	tools/install_test_tools.sh
	MOE_EXT_TESTS=1 $(MAKE) build
	$(BIN)/ctest --test-dir $(BUILD_DIR) --output-on-failure --parallel "$$(nproc)" --exclude-regex asan
	$(PYTEST) $(WORKERS) -m "not serial and not slow" -k "not gradcheck and not opcheck and not compile" tests/ops tests/nn

test-full:
	MOE_EXT_FULL=1 $(MAKE) test compat compat-newest
	$(BIN)/python tests/mutants.py

# A library built against the development torch must serve every torch from the oldest supported one on.
compat: build oldest
	$(call test_under,oldest)

compat-newest: build newest
	$(call test_under,newest)

frameworks: build
	$(call test_with,$(OLDEST_FRAMEWORKS))
	$(call test_with,$(NEWEST_FRAMEWORKS))

# The folder comes before what .venv has.
define test_with
rm -rf build/frameworks
$(BIN)/python -m pip install --quiet --no-deps --target build/frameworks $(1)
PYTHONPATH=$(CURDIR):$(CURDIR)/build/frameworks $(PYTEST) $(WORKERS) $(FRAMEWORK_TESTS)
endef

oldest: TORCH = $(OLDEST_TORCH)
newest: TORCH = $(NEWEST_TORCH)
oldest newest:
	test -x $(VENV)-$@/bin/python || $(PYTHON) -m venv $(VENV)-$@
	$(VENV)-$@/bin/python tools/install.py --torch $(TORCH) pytest pytest-timeout pytest-xdist hypothesis numpy

define test_under
PYTHONPATH=. $(VENV)-$(1)/bin/python -m moe_ext info --brief
$(VENV)-$(1)/bin/python -m pytest $(WORKERS) -m compat tests/ops tests/comm tests/distributed tests/dispatch tests/nn tests/compression tests/optim tests/test_runtime_library.py
endef

docs: build
	$(BIN)/python tools/install.py --extra docs
	$(BIN)/sphinx-build --quiet --jobs auto --fail-on-warning --builder html docs build/docs
	@echo "make docs: open build/docs/index.html"

docs-check: docs
	$(BIN)/python tools/check_site.py build/docs

lint: style types

style: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell $$(git ls-files)
	$(PYTEST) --quiet --noconftest tests/test_words.py tests/test_architecture.py
	$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)

types: $(VENV)/.installed
	$(BIN)/mypy

# A peer that cannot be installed here is left out, and its columns hold dashes.
bench: build
	$(BIN)/python tools/install.py --extra bench || echo "make bench: not every peer could be installed"
	$(BIN)/python benchmarks/run.py

# As a user installs it; the objects of _C are those of `make build`.
cuda: build oldest
	rm -rf $(INSTALLED)
	REUSED_BUILD=$(CURDIR)/$(BUILD_DIR) CMAKE_CXX_COMPILER_LAUNCHER=$(CURDIR)/tools/reuse_objects.sh \
		MOE_EXT_CUDA=1 MOE_EXT_TESTS=0 $(OLDEST)/bin/pip install --quiet --no-deps --target $(INSTALLED) .
	cd $(INSTALLED) && $(OLDEST)/bin/python -m moe_ext info
	cd $(INSTALLED) && MOE_EXT_CUDA=1 $(OLDEST)/bin/python -m pytest --quiet -m compat $(addprefix $(CURDIR)/tests/test_,cuda_library.py runtime_library.py)
	$(BIN)/python tools/install.py --extra cuda || echo "make cuda: cuobjdump and nvdisasm could not be installed"
	$(BIN)/python tools/kernel_resources.py build/cmake-$$($(OLDEST)/bin/python -c 'import torch; print(torch.__version__)')

wheel: $(VENV)/.installed
	$(BIN)/python tools/install.py --extra release
	$(BIN)/python tools/wheel.py build

# Every torch and every Python that is named once: their pairs would be nine environments of 5 GB.
wheel-check:
	$(BIN)/python tools/wheel.py check $(OLDEST_TORCH)@3.10 $(NEWEST_TORCH)@3.13

gpu-check:
	$(PYTHON) tools/gpu_check.py $(if $(OUT),--out $(OUT)/gpu.json)

gpu-tune:
	$(PYTHON) tools/gpu_check.py --tune $(if $(OUT),--out $(OUT)/gpu.json)

gpu-report:
	$(PYTHON) tools/gpu_check.py $(if $(OUT),--out $(OUT)/gpu.json) --report docs/gpu.md

clean:
	rm -rf build dist moe_ext/_C.so moe_ext/_C_cuda.so moe_ext/_runtime.*.so
