# The two commands of this project are `make demo` and `make test`; `make help` lists all.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

JOBS ?= $(shell nproc)
FUZZ_SECONDS ?= 600
VENV := build/venv
BENCH_VENV := build/bench-venv
PYTEST := $(VENV)/bin/python -m pytest -q -p no:cacheprovider
JAX_TESTS := tests/python/jax tests/python/test_docs.py
# Warnings stop the build in CI only: a newer compiler's new warning must not stop a user's.
WERROR := $(if $(CI),ON,OFF)

.PHONY: help demo test bench bench-rows bench-attention bench-python format lint fuzz setup release asan clang python clean

help:  ## List these commands
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: release  ## Build, run two worked examples and the benchmarks of this machine's kernels
	@{ echo "== A worked example: the best key's weight as keys are added (examples/sharpness.cc)"; \
	   build/release/bin/example_sharpness; \
	   echo; echo "== One matching key among more and more others (examples/needle.cc)"; \
	   build/release/bin/example_needle; \
	   echo; echo "== Speed of this machine's kernels (whet bench rows)"; \
	   build/release/bin/whet bench rows; \
	   echo; echo "== The same for attention (whet bench attention)"; \
	   build/release/bin/whet bench attention; } | tee build/demo.txt
	@echo; echo "The same stands in build/demo.txt. Next: make test, or make bench to compare with torch and JAX."

test: release asan clang python  ## Run every test: C++, sanitizers, fuzzers, command line, packages
	@echo "== C++ tests, gcc"; ctest --preset release -j $(JOBS)
	@echo "== C++ tests, AddressSanitizer and UndefinedBehaviorSanitizer"; ctest --preset asan -j $(JOBS)
	@echo "== C++ tests and short fuzzing, clang"; ctest --preset clang -j $(JOBS)
	@echo "== Format"; $(MAKE) --no-print-directory format-check
	@echo "== Command line, installed packages, Python"
	@WHET_BUILD=$(CURDIR)/build/release $(PYTEST) tests $(addprefix --ignore=,$(JAX_TESTS))
	@echo "== JAX, documents"  # a process of their own: a process with JAX in it must not fork, and the others do
	@$(PYTEST) $(JAX_TESTS)
	@echo "== Command line again, with sanitizers"
	@WHET_BUILD=$(CURDIR)/build/asan $(PYTEST) tests/cli
	@echo "== Python arguments again, with sanitizers"
	@tools/with-sanitizers.sh build/asan $(PYTEST) tests/python/test_arguments.py tests/python/test_random.py

bench: bench-rows bench-attention bench-python  ## Compare with torch and JAX (own virtual environments, about twenty minutes)

bench-rows: release
	@tools/setup.sh bench
	$(BENCH_VENV)/bin/python bench/rows.py --lib build/release/libwhet.so --json build/rows.json --markdown build/rows.md

bench-attention: release
	@tools/setup.sh bench
	$(BENCH_VENV)/bin/python bench/attention.py --lib build/release/libwhet.so --json build/attention.json --markdown build/attention.md

bench-python: python
	$(VENV)/bin/python bench/python_torch.py
	$(VENV)/bin/python bench/python_jax.py

SOURCES = $(shell git ls-files '*.cc' '*.h' '*.c')
format: setup  ## Format the C and C++ sources
	clang-format -i $(SOURCES)

.PHONY: format-check
format-check:
	@clang-format --dry-run --Werror $(SOURCES) && echo "all files formatted"

lint: clang  ## clang-tidy over the sources
	run-clang-tidy -quiet -p build/clang '/src/(core|cli|c_api)/[a-z_]*(?<!_test)[.]cc$$'

fuzz: clang  ## Fuzz the .npy reader and the rule parser for FUZZ_SECONDS each (default 600)
	cd build/clang/tests/fuzz && for name in npy rule; do \
	  ./$${name}_fuzz -max_total_time=$(FUZZ_SECONDS) -max_len=4096 -timeout=5 -malloc_limit_mb=16 \
	    -print_final_stats=1 -artifact_prefix=$$name- corpus/$$name seeds/$$name; done

setup:
	@tools/setup.sh

$(VENV)/.done: tests/requirements.txt
	@tools/setup.sh tests

# Each preset builds into build/<preset>; the one with sanitizers also the extension of the Python package.
asan: $(VENV)/.done
asan: EXTRA := -DWHET_BUILD_PYTHON=ON -DPython_EXECUTABLE=$(CURDIR)/$(VENV)/bin/python
release asan clang: setup
	@echo "== Building build/$@"
	@cmake --preset $@ -DWHET_WERROR=$(WERROR) $(EXTRA) > build/$@.log 2>&1 || { cat build/$@.log; exit 1; }
	@cmake --build --preset $@ -j $(JOBS) -- --quiet

# Without isolation, so that the paths of its tools stay and a second build compiles only what changed.
python: setup $(VENV)/.done  ## Install the Python package into build/venv
	@echo "== Installing the Python package into $(VENV)"
	@CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(VENV)/bin/pip install --quiet --disable-pip-version-check \
	  --no-build-isolation --no-deps --config-settings=cmake.define.WHET_WERROR=$(WERROR) .

clean:  ## Remove everything that was built
	rm -rf build
