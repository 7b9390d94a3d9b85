# SPDX-License-Identifier: Apache-2.0
# `make demo` shows FlowNPU, `make test` tests it; both first make a Python environment in .venv.

# The first Python on this machine that is new enough.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
SOURCES := $(shell find aie ep ops graph_rewrites python -name '*.cc' -o -name '*.h' -o -name '*.hpp' -o -name '*.py') CMakeLists.txt pyproject.toml
TESTING_SOURCES := $(shell find tests -name '*.cc' -o -name '*.h') $(wildcard build/xrt/root)
MODEL := out/gemma3-topics
# The build tools at the versions of releases, so that pip does not exchange them while they build.
BUILD_TOOLS := $(shell sed -n 's/^ *"\(\(cmake\|nanobind\|ninja\|scikit-build-core\)==[^"]*\)",$$/\1/p' pyproject.toml | sort -u)
TOOLS := PATH="$(CURDIR)/$(BIN):$$PATH"
# A build for this machine, in half the time (CMakeLists.txt). The builds of `pip install` and of the wheels are others.
QUICK := --config-settings=cmake.define.FLOWNPU_QUICK=ON
WITHOUT_CXX := --config-settings=wheel.cmake=false --config-settings=wheel.py-api=py3

export ORT_DISABLE_TELEMETRY = 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# With this variable each of the hundreds of Pythons that the tests start would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test environment sanitizers tools collect tests site lint mlir-opt xrt-headers xrt chromium vulkan lavapipe client-suites sanitize fuzz
.PHONY: clients figures wheels windows clean demo-packages demo-wheel

help:
	@echo 'make demo      build FlowNPU, convert a small model and generate text with it: some minutes'
	@echo 'make test      run all checks and tests, as CI does: 20 to 30 minutes on two cores'
	@echo 'make environment  install FlowNPU into .venv with all that its tests need'
	@echo 'make lint      check style and types of all files, or of those that differ from a commit (CHANGED=main)'
	@echo 'make site      build the documentation as a site in out/site'
	@echo 'make sanitize  run the C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer'
	@echo 'make clients   install third-party clients and try the server with them'
	@echo 'make fuzz      try random graphs, decoders and damaged files under the sanitizers (CASES=2000 SEED=1)'
	@echo 'make figures   draw the pictures of the README and of docs/npu.md'
	@echo 'make wheels    build the sources and the wheels for Linux (glibc 2.28 or newer) in dist'
	@echo 'make windows   build for Windows x64 in dist/windows, and try it where there is Wine'
	@echo 'make clean     remove .venv, build, out and dist'

demo: .venv/demo
	$(BIN)/flownpu convert tests/fixtures/gemma3-topics $(MODEL) --force
	$(BIN)/flownpu run $(MODEL) --no-chat-template --prompt 'The "for" statement is used to'

# Long steps on one core (mypy, downloads, linking) run beside compilers; the tests have the machine for themselves.
# It stops at the first part that fails, and at the end prints how long each part took.
test:
	@rm -f build/times
	+@$(MAKE) --no-print-directory --jobs 2 part-environment
	+@$(MAKE) --no-print-directory --jobs 4 --output-sync=recurse part-collect part-lint part-sanitizers part-tools
	+@$(MAKE) --no-print-directory part-sanitize
	+@$(MAKE) --no-print-directory part-tests ONCE='--build=RELEASED'
	@cat build/times

part-%:
	+@sh scripts/timed.sh $* $(MAKE) --no-print-directory $*

environment: .venv/test

sanitizers: build/sanitize/built

# One after the other, since apt and npm lock their state.
tools:
	+@$(MAKE) --no-print-directory xrt
	+@$(MAKE) --no-print-directory mlir-opt
	+@$(MAKE) --no-print-directory vulkan
	+@$(MAKE) --no-print-directory lavapipe
	+@$(MAKE) --no-print-directory chromium
	+@$(MAKE) --no-print-directory client-suites

# Imports all tests, so that a file that cannot be imported is found early; and compiles what they import, once: Python's
# packages are installed without, and each of the processes below would compile 13 seconds of them at the same time.
collect: .venv/test
	@$(BIN)/python -m pytest --collect-only --quiet >build/collected || { cat build/collected; exit 1; }

# ONCE: arguments of pytest that leave out what `make test` has run in another build (tests/builds.py).
tests: .venv/test
	$(BIN)/python -m pytest $(PARALLEL) $(ONCE)

site: .venv/test
	$(TOOLS) mkdocs build --strict --quiet

# The files that differ from where HEAD left a commit or branch, and those that git does not know yet.
DIFFERING = $$(git diff --name-only --diff-filter=d $$(git merge-base HEAD $(CHANGED)); git ls-files --others --exclude-standard)

# Formats files as well; the checks are those of .pre-commit-config.yaml.
lint: .venv/test
	$(TOOLS) pre-commit run $(if $(CHANGED),--files $(DIFFERING),--all-files)

# Tools for the tests, from Debian's packages (scripts/tools.py). Tests that need one are skipped where it cannot be had.
mlir-opt xrt-headers xrt chromium vulkan lavapipe: | .venv
	@$(BIN)/python -m scripts.tools $@

xrt: | xrt-headers

# A small suite for servers of OpenAI's API, from npm; likewise.
client-suites: .venv/test
	@$(BIN)/python -m scripts.environments

# Third-party clients of Python and of npm: 520 MB, and too slow for every run of the tests.
clients: .venv/test
	$(BIN)/python -m scripts.environments clients npm-clients
	$(BIN)/python -m pytest tests/serve/clients

# A process more than cores, since tests wait for their own processes and files, but at most 4 (each needs some GB). A
# process gets whole files, so that fixtures are made once, in the order of tests/conftest.py, which begins with the
# longest. pytest-xdist does not start a process again that crashes: it would run the file from its beginning, crash
# again, and at last wait for ever.
PARALLEL := --numprocesses $$(($$(nproc) + 1)) --maxprocesses 4 --dist loadfile --no-loadscope-reorder --max-worker-restart=0

# The sanitizers' run-time library, and the C++ one whose exceptions it watches, must be loaded before Python. Python itself
# leaks. graph_rewrites tests flownpu._native. A sanitizer's report is not captured by pytest.
# With a space in the place of "=", pytest would take the library for the path of tests.
sanitize: build/sanitize/built
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so.6)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 FLOWNPU_TESTING_DIR=build/sanitize \
	$(BIN)/python -m pytest $(PARALLEL) --capture=sys --build=SANITIZED --library=build/sanitize/libflownpu_ep.so

# The same command runs the same cases. A decoder takes ten times as long as a graph, so there are a tenth as many.
CASES ?= 2000
SEED ?= 1
fuzz: build/sanitize/built
	$(BIN)/python -m tests.fuzz graphs --sanitize --cases $(CASES) --seed $(SEED)
	$(BIN)/python -m tests.fuzz damage --sanitize --cases $(CASES) --seed $(SEED)
	$(BIN)/python -m tests.fuzz decoders --sanitize --cases $$(( $(CASES) / 10 )) --seed $(SEED)

# Everything is sanitized, with the modules through which tests call C++. Only models on the emulated array call the other
# build's NPU kernels; the kernels' own tests call sanitized ones.
build/sanitize/built: .venv/test
	$(TOOLS) cmake -S . -B build/sanitize -G Ninja -DFLOWNPU_TESTING=ON -DFLOWNPU_WERROR=ON -DFLOWNPU_SANITIZE=ON \
		-DFLOWNPU_QUICK=ON -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python
	MAKEFLAGS= $(BIN)/cmake --build build/sanitize --target flownpu_testing flownpu_aie_testing flownpu_ep flownpu_native
	cp build/testing/libflownpu_aie_xdna*.so build/sanitize/
	touch $@

figures: .venv/test chromium
	$(BIN)/python scripts/figures/demo.py
	$(BIN)/python scripts/figures/npu_designs.py
	$(BIN)/flownpu convert tests/fixtures/gemma3-shapes out/gemma3-shapes --force
	$(BIN)/python -m scripts.figures.chat_page out/gemma3-shapes

wheels: | .venv
	$(BIN)/python -m scripts.release.wheels

windows: .venv/test
	$(BIN)/python -m scripts.release.windows
	FLOWNPU_WINDOWS=1 $(BIN)/python -m pytest tests/windows

clean:
	rm -rf .venv build out dist

.venv:
	@test -n '$(PYTHON)' || { echo 'FlowNPU needs Python 3.11 or newer, and found none: install it, or say make PYTHON=/path/to/python'; exit 1; }
	$(PYTHON) -m venv .venv || { rm -rf .venv; echo 'This Python cannot make environments: install its venv module (Debian, Ubuntu: apt install python3-venv)'; exit 1; }

# Python compiles a module when it imports it. Tests import a tenth of all, whose compilation would take over a minute.
INSTALL := $(BIN)/pip install --quiet --no-compile

# .venv/demo and .venv/test say that FlowNPU is installed; after an edit of the sources it is installed again.
.venv/demo: $(SOURCES) | .venv
	+@$(MAKE) --no-print-directory --jobs 2 demo-packages demo-wheel
	$(INSTALL) --no-deps --force-reinstall build/demo/wheel/*.whl
	@touch $@

# The packages that FlowNPU needs are installed while its C++ is compiled, with a FlowNPU that has no C++ yet.
demo-packages: .venv/builder
	@$(INSTALL) --no-build-isolation $(WITHOUT_CXX) '.[genai,convert]'

demo-wheel: .venv/builder
	@rm -rf build/demo/wheel
	@$(TOOLS) python scripts/progress.py 'Compiling FlowNPU, and installing the packages that it needs into .venv' \
		pip wheel --verbose --no-deps --no-build-isolation --wheel-dir build/demo/wheel \
		--config-settings=build-dir=build/demo $(QUICK) .

.venv/builder: pyproject.toml | .venv
	$(INSTALL) $(BUILD_TOOLS)
	touch $@

# Likewise for the tests.
.venv/needed: .venv/builder
	$(INSTALL) --no-build-isolation $(WITHOUT_CXX) '.[dev]'
	touch $@

# One build makes what is installed and the modules through which tests call C++. It stays in build/testing, so that the
# next build compiles only what is new.
WHEEL := build/testing/wheel
$(WHEEL)/built: .venv/builder $(SOURCES) $(TESTING_SOURCES) | xrt-headers
	rm -rf $(WHEEL)
	$(TOOLS) python scripts/progress.py 'Compiling FlowNPU and the modules of its tests' \
		pip wheel --verbose --no-deps --no-build-isolation --wheel-dir $(WHEEL) --config-settings=build-dir=build/testing \
		--config-settings=cmake.define.FLOWNPU_TESTING=ON --config-settings=cmake.define.FLOWNPU_WERROR=ON $(QUICK) .
	touch $@

.venv/test: .venv/needed $(WHEEL)/built
	$(INSTALL) --no-deps --force-reinstall $(WHEEL)/*.whl
	touch $@ .venv/demo
