# The two commands of this project are `make demo` and `make test`; `make help` lists all.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

JOBS ?= $(shell nproc)
FUZZ_SECONDS ?= 600
SECONDS ?= 3600
VENV := build/venv
BENCH_VENV := build/bench-venv
TABLES ?= build# where benchmarks leave their tables
PYTEST := $(VENV)/bin/python -m pytest -q -p no:cacheprovider
JAX_TESTS := tests/python/jax tests/python/test_docs.py
# Warnings stop the build in CI only: a newer compiler's new warning must not stop a user's.
WERROR := $(if $(CI),ON,OFF)

.PHONY: help demo test bench bench-rows bench-attention bench-train bench-python bench-transformers bench-decoder bench-mpi format lint fuzz soak setup setup-aarch64 release asan tsan clang aarch64 python clean

help:  ## List these commands
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Only the whet command is built, without what tests need; `make test` builds the rest in the same folder.
demo:  ## Build the command, train two heads and compare them, from a bare Debian
	@tools/setup.sh demo
	@echo "== Building build/release/bin/whet"
	@[ -f build/release/build.ninja ] || cmake --preset release -DWHET_BUILD_TESTS=OFF -DWHET_BUILD_EXAMPLES=OFF \
	  > build/release.log 2>&1 || { cat build/release.log; exit 1; }
	@cmake --build --preset release -j $(JOBS) --target whet_cli
	@echo "== build/release/bin/whet demo build/demo"
	@build/release/bin/whet demo build/demo

test: release asan tsan clang wheel  ## Run every test: C++, sanitizers, fuzzers, command line, packages
	@echo "== C++ tests, gcc"; ctest --preset release -j $(JOBS)
	@echo "== C++ tests, AddressSanitizer and UndefinedBehaviorSanitizer"; ctest --preset asan -j $(JOBS)
	@echo "== What runs on several threads, ThreadSanitizer"; ctest --preset tsan -j $(JOBS)
	@echo "== C++ tests and short fuzzing, clang"; ctest --preset clang -j $(JOBS)
	@echo "== Format"; $(MAKE) --no-print-directory format-check
	@echo "== clang-tidy"; $(TIDY) -checks='-clang-analyzer-*' > build/tidy.log 2>&1 || { cat build/tidy.log; exit 1; }
	@echo "== Python sources"; $(MAKE) --no-print-directory lint-python
	@tools/setup.sh tests  # a browser, if the environment is older than the tests that need one
	@echo "== Tests in Python, as many at a time as there are processors; each is shown when it ends"
	@$(MAKE) --no-print-directory -j $(JOBS) --output-sync=target test-asan-command test-jax test-python test-asan-python

# A process with JAX in it must not fork, and other tests do.
.PHONY: test-python test-jax test-asan-command test-asan-python
test-python:
	@echo "== Command line, pages, installed packages, Python"
	@WHET_BUILD=$(CURDIR)/build/release $(PYTEST) tests $(addprefix --ignore=,$(JAX_TESTS))
test-jax:
	@echo "== JAX, documents"
	@$(PYTEST) $(JAX_TESTS)
test-asan-command:
	@echo "== Command line again, with sanitizers"
	@WHET_BUILD=$(CURDIR)/build/asan $(PYTEST) tests/cli
test-asan-python:
	@echo "== Python arguments again, with sanitizers"
	@tools/with-sanitizers.sh build/asan $(PYTEST) tests/python/test_arguments.py tests/python/test_random.py

# Everything with the longest vectors that SVE may have (2,048 bits); what is held to the contract, with shorter ones too.
.PHONY: test-aarch64
test-aarch64: aarch64  ## Run the tests of the library for aarch64, NEON and SVE, under emulation (not part of make test)
	@echo "== C++ tests, SVE of 256 bytes, and NEON"
	@QEMU_CPU=max,sve-default-vector-length=256 ctest --preset aarch64 -j $(JOBS)
	@for bytes in 32 16; do echo "== C++ tests, SVE of $$bytes bytes"; \
	  QEMU_CPU=max,sve-default-vector-length=$$bytes ctest --preset aarch64 -j $(JOBS) -R 'Contract|Dense|Of16Bits'; done

bench: bench-rows bench-attention bench-train bench-python bench-transformers bench-decoder bench-mpi  ## Compare with torch, JAX and transformers (own virtual environments, about fifty minutes)

bench-rows: release
	@tools/setup.sh bench
	$(BENCH_VENV)/bin/python -m bench.rows --lib build/release/libwhet.so --json build/rows.json --markdown $(TABLES)/rows.md

bench-attention: release
	@tools/setup.sh bench
	$(BENCH_VENV)/bin/python -m bench.attention --lib build/release/libwhet.so --json build/attention.json --markdown $(TABLES)/attention.md

bench-train: release
	@tools/setup.sh bench
	$(BENCH_VENV)/bin/python -m bench.training --whet build/release/bin/whet > $(TABLES)/train.md
	@cat $(TABLES)/train.md

bench-python: python
	$(VENV)/bin/python -m bench.python.torch_calls > $(TABLES)/python.md
	$(VENV)/bin/python -m bench.python.jax_calls >> $(TABLES)/python.md
	@cat $(TABLES)/python.md

bench-transformers: python
	$(VENV)/bin/python -m bench.language_model > $(TABLES)/transformers.md
	@cat $(TABLES)/transformers.md

bench-decoder: python
	$(VENV)/bin/python -m bench.decoder > $(TABLES)/decoder.md
	@cat $(TABLES)/decoder.md

bench-mpi: release
	python3 -m bench.mpi --build build/release > $(TABLES)/mpi.md
	@cat $(TABLES)/mpi.md

SOURCES = $(shell git ls-files '*.cc' '*.h' '*.c')
format: setup  ## Format the C and C++ sources
	clang-format -i $(SOURCES)

.PHONY: format-check
format-check:
	@clang-format --dry-run --Werror $(SOURCES) && echo "all files formatted"

# clang-tidy needs of a build only its compile_commands.json and the sources it generates. Its own compiler is newer than
# the build's: what that warns of is no error.
TIDY = $(VENV)/bin/python $(VENV)/bin/run-clang-tidy.py -quiet -j $(JOBS) -clang-tidy-binary $(VENV)/bin/clang-tidy \
  -extra-arg=-Wno-error -p build/clang '/src/(core|files|results|lab|report|cli|c_api)/[a-z_]*(?<!_test)[.]cc$$'

lint: clang $(VENV)/.done  ## clang-tidy over the sources, with the static analyzer, which make test leaves out (ten minutes)
	$(TIDY)

.PHONY: lint-python
lint-python: $(VENV)/.done  ## ruff and mypy over the Python sources
	@$(VENV)/bin/python -m ruff check
	@$(VENV)/bin/python -m mypy
	@$(VENV)/bin/python -m mypy --strict --follow-imports=silent tests/python/typing/calls.py

fuzz: clang  ## Fuzz the JSON, .npy and safetensors readers and the rule parser for FUZZ_SECONDS each (default 600)
	cd build/clang/tests/fuzz && for name in json npy rule safetensors; do \
	  ./$${name}_fuzz -max_total_time=$(FUZZ_SECONDS) -max_len=4096 -timeout=5 -malloc_limit_mb=16 \
	    -print_final_stats=1 -artifact_prefix=$$name- corpus/$$name seeds/$$name; done

soak: release clang  ## Random calls against the oracle, disturbed runs, fuzzers, for SECONDS (default 3600)
	python3 tests/soak/soak.py --seconds $(SECONDS) --fuzzers build/clang

setup:
	@tools/setup.sh build
setup-aarch64:
	@tools/setup.sh aarch64

$(VENV)/.done: tests/requirements.txt tools/wheel-requirements.txt
	@tools/setup.sh tests

# Each preset builds into build/<preset>; the one with sanitizers also the extension of the Python package.
asan: $(VENV)/.done
asan: EXTRA := -DWHET_BUILD_PYTHON=ON -DPython_EXECUTABLE=$(CURDIR)/$(VENV)/bin/python
release asan tsan clang: setup
aarch64: setup-aarch64
release asan tsan clang aarch64:
	@echo "== Building build/$@"
	@cmake --preset $@ -DWHET_WERROR=$(WERROR) $(EXTRA) > build/$@.log 2>&1 || { cat build/$@.log; exit 1; }
	@cmake --build --preset $@ -j $(JOBS) -- --quiet

# The package's own build, in the folder of the release and with the same cmake, so that it compiles no source again. Without
# isolation, so that the paths of its tools stay.
IN_RELEASE := -C build-dir=build/release -C cmake.version='>=3.21' -C 'build.targets=_core;whet_cli' \
  $(foreach option,WERROR=$(WERROR) BUILD_TESTS=ON BUILD_EXAMPLES=ON,-C cmake.define.WHET_$(option))
python wheel: export CMAKE_EXECUTABLE = $(shell command -v cmake)
python wheel: export CMAKE_BUILD_PARALLEL_LEVEL = $(JOBS)
python: setup $(VENV)/.done  ## Install the Python package into build/venv
	@echo "== Installing the Python package into $(VENV)"
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps $(IN_RELEASE) .

.PHONY: wheel test-wheel
wheel: python  ## Build the wheel and the sdist into build/wheels
	@echo "== Building the wheel and the sdist into build/wheels"
	@tools/wheel.sh $(VENV)/bin/python $(IN_RELEASE)

test-wheel: wheel  ## Run the wheel's tests in a bare Debian, and install from the sdist (needs root)
	@tools/test-wheel.sh
	@tools/test-sdist.sh

clean:  ## Remove everything that was built
	rm -rf build
