# Thin names for commands. `make demo` and `make test` do everything on a fresh Debian 12 or Ubuntu 24.04.
PYTHON ?= python3
BIN    := .venv/bin
MESON  := PATH="$(CURDIR)/$(BIN):$$PATH" meson
C_FILES = $(shell find include ops simulation cuda bindings/torch tests/c -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' -o -name '*.inc' -o -name '*.cpp' -o -name '*.hpp')
# What goes into the installed package: a change here installs it again.
PACKAGE := $(shell find include ops simulation cuda bindings meson.build meson_options.txt muvox.map pyproject.toml -type f \
             -not -path '*/__pycache__/*') README.md
# CUDA kernels are compiled once, for the package. A second time, for the tests in C, only where a device can run these
# (or `make build CUDA_TESTS=enabled`); GPU_ARCH=80,90,100,120 builds for more than one architecture.
CUDA_TESTS ?= $(if $(wildcard /dev/nvidiactl),auto,disabled)
ARCHITECTURES := $(if $(GPU_ARCH),-Dgpu_arch=$(GPU_ARCH))
# `make test` compiles with warnings as errors; `make demo` shall not fail because a newer compiler warns of more.
WERROR := false
test test-all: WERROR := true
# Sanitizers slow the tests down and must stop at what they find.
SANITIZE := CK_TIMEOUT_MULTIPLIER=10 ASAN_OPTIONS=abort_on_error=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1

.PHONY: build demo bench test test-all check-c check-sanitize sanitize-cuda check-install check-python check-format format screenshots clean

build: .venv/installed build/build.ninja
	$(MESON) compile -C build

demo: build
	$(BIN)/python -m muvox demo

bench: build
	$(BIN)/python -m muvox bench

# Stops at the first part that fails.
test: build check-format check-c check-sanitize check-install check-python

test-all: PYTEST := -m ""
test-all: test

check-c: build
	$(MESON) configure build -Dwerror=true
	$(MESON) test -C build -v

check-sanitize: build build-sanitize/build.ninja
	$(SANITIZE) $(MESON) test -C build-sanitize -v --timeout-multiplier 5

# The tests on a device under each tool of compute-sanitizer, every n-th case of them; not part of `make test`.
EVERY ?= 37
sanitize-cuda: build
	for tool in 'memcheck --leak-check full --report-api-errors no' racecheck initcheck synccheck; do \
	    MUVOX_TEST_EVERY=$(EVERY) compute-sanitizer --tool $$tool --error-exitcode 1 build/tests/test_cuda || exit 1; \
	done

check-install: build
	BIN=$(BIN) scripts/check-install build

PYTEST ?= -m "not slow"
JOBS ?= 2
check-python: build .venv/browser
	sed -n '/^```python$$/,/^```$$/p' README.md | sed '/^```/d' | $(BIN)/python -
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) $(PYTEST)

# The picture in README.md: a report on the sample scans and the network of `make demo`.
screenshots: build .venv/browser
	test -f demo/voxelnet.pt || $(BIN)/python -m muvox demo
	$(BIN)/python -m muvox report tests/data/x0net250-sample.h5 demo/voxelnet.pt -o demo/report.html \
	    --screenshot docs/report.png

check-format: .venv/installed
	$(BIN)/clang-format --dry-run -Werror $(C_FILES)

format: .venv/installed
	$(BIN)/clang-format -i $(C_FILES)

clean:
	rm -rf build build-* .venv demo

# A browser for the tests; `make demo` needs none.
.venv/browser: scripts/system-packages | .venv/requirements
	PYTHON="$(PYTHON)" scripts/system-packages browser
	touch $@

.venv/requirements: scripts/system-packages scripts/constraints.txt
	PYTHON="$(PYTHON)" scripts/system-packages
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c scripts/constraints.txt meson-python meson ninja
	touch $@

# The build folder is kept, so that only what changed is compiled again.
.venv/installed: .venv/requirements $(PACKAGE)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install --no-build-isolation -c scripts/constraints.txt \
	    --config-settings=build-dir=build-wheel $(ARCHITECTURES:%=--config-settings=setup-args=%) '.[train,test]'
	@$(BIN)/python -m muvox info | grep '^CUDA kernels'
	touch $@

build/build.ninja: | .venv/requirements
	$(MESON) setup build -Dtests=enabled -Dwerror=$(WERROR) -Dcuda=$(CUDA_TESTS) $(ARCHITECTURES)

build-sanitize/build.ninja: | .venv/requirements
	$(MESON) setup build-sanitize -Dtests=enabled -Dpython=false -Dcuda=disabled -Dwerror=true -Dbuildtype=debugoptimized \
	    -Db_sanitize=address,undefined -Dc_args=-fno-sanitize-recover=all
