# SPDX-License-Identifier: Apache-2.0
# `make demo` and `make test` are all a newcomer types; both make their environment in .venv.

# The first Python on this machine that is new enough.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
SOURCES := $(shell find aie ep ops graph_rewrites python -name '*.cc' -o -name '*.h' -o -name '*.hpp' -o -name '*.py') CMakeLists.txt pyproject.toml
TESTING_SOURCES := $(shell find tests -name '*.cc' -o -name '*.h') $(wildcard build/xrt/root)
MODEL := out/gemma3-topics
# What builds, at the versions that pyproject.toml names for releases: installing the rest must not exchange them meanwhile.
BUILD_TOOLS := $(shell sed -n 's/^ *"\(\(cmake\|nanobind\|ninja\|scikit-build-core\)==[^"]*\)",$$/\1/p' pyproject.toml | sort -u)
TOOLS := PATH="$(CURDIR)/$(BIN):$$PATH"

export ORT_DISABLE_TELEMETRY = 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# The tests start hundreds of Pythons, which would each compile all that they import: half of what a command takes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test environment sanitizers tools tests check site lint mlir-opt xrt-headers xrt chromium client-suites sanitize fuzz
.PHONY: clients figures clean

help:
	@echo 'make demo      build FlowNPU, convert the small model of this repository and generate text with it'
	@echo 'make test      all checks and tests, as in CI'
	@echo 'make check     the same of what differs from main, in minutes: its style, its types, the tests that look at it'
	@echo 'make lint      the checks alone; FIX=1 mends what tools can mend, CHANGED=main looks at less'
	@echo 'make site      the documentation as a site, in out/site'
	@echo 'make sanitize  the C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer'
	@echo 'make clients   the server asked by clients that others wrote, which it installs: minutes'
	@echo 'make fuzz      random graphs, decoders and damaged files, under the same; CASES=50000 SEED=1'
	@echo 'make figures   the pictures of the README and of docs/npu.md, from the real output and the plans'
	@echo 'make wheels    what is released, in dist: sources, and wheels for Linux of glibc 2.28 or newer'
	@echo 'make windows   what is for Windows x64, in dist/windows; where there is Wine it must do under it what it does here'
	@echo 'make clean     remove what make has made'

demo: .venv/demo
	$(BIN)/flownpu convert tests/fixtures/gemma3-topics $(MODEL) --force
	$(BIN)/flownpu run $(MODEL) --no-chat-template --prompt 'The "for" statement is used to'

# What takes one core for long (types, downloads, linking) runs beside what is compiled; tests have the machine for
# themselves. It ends with how long each part took, and at the first that fails.
test:
	@rm -f build/times
	+@$(MAKE) --no-print-directory --jobs 2 part-environment
	+@$(MAKE) --no-print-directory --jobs 3 --output-sync=recurse part-lint part-sanitizers part-tools
	+@$(MAKE) --no-print-directory part-sanitize
	+@$(MAKE) --no-print-directory part-tests
	@cat build/times

part-%:
	+@sh scripts/timed.sh $* $(MAKE) --no-print-directory $*

environment: .venv/test

sanitizers: build/sanitize/built

# One after the other: they are apt's, and npm's.
tools:
	+@$(MAKE) --no-print-directory xrt
	+@$(MAKE) --no-print-directory mlir-opt
	+@$(MAKE) --no-print-directory chromium
	+@$(MAKE) --no-print-directory client-suites

tests: .venv/test
	$(BIN)/python -m pytest $(PARALLEL)

check: .venv/test
	$(TOOLS) python -m scripts.check $(BASE)

site: .venv/test
	$(TOOLS) mkdocs build --strict --quiet

lint: .venv/test
	$(BIN)/python scripts/lint.py $(if $(FIX),--fix) $(if $(CHANGED),--changed $(CHANGED))

# Tools for the tests, from Debian's packages (scripts/tools.py). Tests that need one are skipped where it cannot be had.
mlir-opt xrt-headers xrt chromium: | .venv
	@$(BIN)/python -m scripts.tools $@

xrt: | xrt-headers

# A small suite for servers of OpenAI's API, from npm; likewise.
client-suites: .venv/test
	@$(BIN)/python -m scripts.environments

# Third-party clients of Python and of npm: 620 MB, and too slow for every run of the tests.
clients: .venv/test
	$(BIN)/python -m scripts.environments clients instructor npm-clients
	$(BIN)/python -m pytest tests/serve/clients

# Tests by their files, in as many processes as there are cores: a file's fixtures are made once. At most 4, of some GB each.
# In the order of tests/conftest.py, not files of many tests first: those are the quick ones. A process that crashes is not
# started again: pytest-xdist would run its file from the beginning, crash again, and at last wait for ever.
PARALLEL := --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --max-worker-restart=0

# What may show what only the sanitizers find, memory and undefined behaviour of C++; not the tests marked slow, which run
# more of the same C++, nor those marked opencl, which run others' compilers. Of tests/aie those that each look at another
# part of it: kernels, aie/host/, the emulator. The rest runs plans, which is Python, or the same C++ many times over.
SANITIZED := tests/ops tests/npu tests/ep graph_rewrites $(addprefix tests/aie/,host kernels/test_equations.py kernels/test_attention.py \
	kernels/test_decode_layer.py emulator/test_runs.py emulator/test_deadlocks.py iron/test_conformance.py)
# What runs no C++ of ours, but for the quantiser of tests/ops/functions/test_q4nx.py: definitions in stock ONNX Runtime,
# files in Python, the search for a loader, XRT's own tool.
SANITIZED += $(addprefix --ignore tests/,ops/test_operator_definitions.py \
	ops/test_moe_definition.py ops/test_int8_cache.py ops/functions/test_q4nx_file.py ops/functions/test_opencl_loader.py \
	npu/test_xclbin.py)
# What only asks the compiler.
SANITIZED += $(addprefix --deselect tests/aie/host/test_host.py::,test_refuses_to_compile test_snippet_compiles_for_its_architecture)

# The sanitizers' run time, and the C++ run time whose exceptions it watches, must be there before Python is; Python itself
# is not free of leaks. graph_rewrites is there for flownpu._native. What a sanitizer says goes past pytest's capture of stderr.
sanitize: build/sanitize/built
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so.6)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 FLOWNPU_TESTING_DIR=build/sanitize \
	$(BIN)/python -m pytest $(PARALLEL) --capture=sys -m "not slow and not opencl" --library build/sanitize/libflownpu_ep.so $(SANITIZED)

# The same command runs the same cases. Decoders take ten times as long as graphs: there are a tenth as many.
CASES ?= 2000
SEED ?= 1
fuzz: build/sanitize/built
	$(BIN)/python -m tests.fuzz graphs --sanitize --cases $(CASES) --seed $(SEED)
	$(BIN)/python -m tests.fuzz damage --sanitize --cases $(CASES) --seed $(SEED)
	$(BIN)/python -m tests.fuzz decoders --sanitize --cases $$(( $(CASES) / 10 )) --seed $(SEED)

# All of it under the sanitizers, and with it the modules through which tests call C++. But for the NPU's kernels that
# models call on the emulated array: those are the other build's. The kernels' own tests call sanitized ones.
build/sanitize/built: .venv/test
	$(TOOLS) cmake -S . -B build/sanitize -G Ninja -DFLOWNPU_TESTING=ON -DFLOWNPU_WERROR=ON -DFLOWNPU_SANITIZE=ON \
		-DFLOWNPU_JOIN_UNITS=ON -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python
	MAKEFLAGS= $(BIN)/cmake --build build/sanitize --target flownpu_testing flownpu_aie_testing flownpu_ep flownpu_native
	cp build/testing/libflownpu_aie_xdna*.so build/sanitize/
	touch $@

figures: .venv/test chromium
	$(BIN)/python scripts/figures/demo.py
	$(BIN)/python scripts/figures/npu_designs.py
	$(BIN)/python -m scripts.figures.shapes
	$(BIN)/flownpu convert tests/fixtures/gemma3-shapes out/gemma3-shapes --force
	$(BIN)/python -m scripts.figures.chat_page out/gemma3-shapes

.PHONY: wheels
wheels: | .venv
	$(BIN)/python -m scripts.release.wheels

.PHONY: windows
windows: .venv/test
	$(BIN)/python -m scripts.release.windows
	FLOWNPU_WINDOWS=1 $(BIN)/python -m pytest tests/windows

clean:
	rm -rf .venv build out dist

.venv:
	@test -n '$(PYTHON)' || { echo 'FlowNPU needs Python 3.11 or newer, and found none: install it, or say make PYTHON=/path/to/python'; exit 1; }
	$(PYTHON) -m venv .venv || { rm -rf .venv; echo 'This Python cannot make environments: install its venv module (Debian, Ubuntu: apt install python3-venv)'; exit 1; }

# Files that say what is installed; newer sources install again.
.venv/demo: $(SOURCES) | .venv
	@echo 'Building FlowNPU and installing what it needs into .venv: a few minutes, the first time'
	$(BIN)/pip install --quiet '.[genai,convert]'
	touch $@

# Python compiles what it imports when it does: all of it, of which tests import a tenth, takes more than a minute.
INSTALL := $(BIN)/pip install --quiet --no-compile

.venv/builder: pyproject.toml | .venv
	@echo 'Building FlowNPU and installing what its tests need into .venv: a few minutes, the first time'
	$(INSTALL) $(BUILD_TOOLS)
	touch $@

# What FlowNPU and its tests need, which is installed beside what is compiled; with it FlowNPU without its C++, until that
# is there.
.venv/needed: .venv/builder
	$(INSTALL) --no-build-isolation --config-settings=wheel.cmake=false --config-settings=wheel.py-api=py3 '.[dev]'
	touch $@

# One build makes what is installed and, beside it, the modules through which tests call C++; what builds stays in .venv,
# so that the next build finds it where this one did and compiles what is new. Units are compiled together, as under the
# sanitizers.
WHEEL := build/testing/wheel
$(WHEEL)/built: .venv/builder $(SOURCES) $(TESTING_SOURCES) | xrt-headers
	rm -rf $(WHEEL)
	$(TOOLS) pip wheel --quiet --no-deps --no-build-isolation --wheel-dir $(WHEEL) --config-settings=build-dir=build/testing \
		--config-settings=cmake.define.FLOWNPU_TESTING=ON --config-settings=cmake.define.FLOWNPU_WERROR=ON \
		--config-settings=cmake.define.FLOWNPU_JOIN_UNITS=ON .
	touch $@

.venv/test: .venv/needed $(WHEEL)/built
	$(INSTALL) --no-deps --force-reinstall $(WHEEL)/*.whl
	touch $@ .venv/demo
