# From a fresh clone to a running job, the tests and the checks. Compiling is csrc/Makefile's business.
#
#   make demo  [ARGS="--steps 50"] [NPROC=2]   fine-tunes a small model on NPROC processes
#   make test  [PYTEST="-k store"]             C++ unit tests (plain, ASan + UBSan, TSan), then pytest
#   make test-peer                             PyTorch's own distributed_test on iroh, with 3 and with 4 ranks, then:
#   make test-frameworks                       Lightning, Hugging Face, Ignite, DeepSpeed: pip installs them first
#   make bench [ARGS=...]                      our figures beside those of gloo and of the raw link
#   make native                                compiles what changed (`make unit`: and runs the C++ unit tests)
#   make lint | format | clean | distclean
#
# Variables: PYTHON (makes the environment), VENV (its folder; may be one that exists), CXX, TORCH (what pip installs as
# torch, e.g. TORCH=torch==2.14.0; without it a torch that is there is kept, else the CPU build of 2.13.0).

PYTHON ?= python3
VENV ?= .venv
TORCH ?=
NPROC ?= 2
ARGS ?=
PYTEST ?=
JOBS ?= $(shell getconf _NPROCESSORS_ONLN)

ifeq ($(origin CXX),default)
CXX := c++
endif
bin := $(VENV)/bin
pip := $(bin)/python -m pip
# As csrc/Makefile sees it, one folder below.
native_python := $(if $(filter /%,$(VENV)),,../)$(bin)/python
cpp_files = $(shell find csrc tests/cpp tests/accelerator tests/accelerator_inner -name '*.cpp' -o -name '*.hpp')

.NOTPARALLEL:  # pip compiles too; the makes below are the parallel ones
.PHONY: demo test test-peer test-frameworks bench native unit build-sanitized unit-sanitized lint format clean distclean torch system-for-build system-for-test
.DEFAULT_GOAL := demo

# ---- what people call ----

# Its ranks would share this machine's memory; the demo is of iroh.
demo: $(VENV)/installed-demo native
	TORCH_IROH_SHARED_MEMORY=$${TORCH_IROH_SHARED_MEMORY-off} \
	  $(bin)/torchrun --nproc-per-node=$(NPROC) examples/finetune.py $(ARGS)

# Many of the tests wait for time-outs: the sanitized unit tests are compiled meanwhile, only where nobody else wants
# a core.
test: $(VENV)/installed-demo $(VENV)/installed-test native unit
	@idle="chrt --idle 0"; $$idle true 2>/dev/null || idle="nice -n 19"; mkdir -p build; \
	$$idle $(MAKE) build-sanitized > build/sanitized.log 2>&1 & compiler=$$!; \
	$(bin)/python -m pytest --ignore=tests/frameworks $(PYTEST); tested=$$?; \
	wait $$compiler || { cat build/sanitized.log; exit 1; }; exit $$tested
	$(MAKE) unit-sanitized

# `make test` has it with 3 ranks only.
test-peer: $(VENV)/installed-test native
	PEER_WORLDS="3 4" $(bin)/python -m pytest tests/peer $(PYTEST)
	$(MAKE) test-frameworks

# Apart, because it installs 340 MB and takes 5 to 9 minutes on two cores, most of them imports.
test-frameworks: $(VENV)/installed-demo $(VENV)/installed-test native
	$(bin)/python -m pytest tests/frameworks $(PYTEST)

bench: $(VENV)/installed-test native
	$(bin)/python benchmarks/stream.py $(ARGS)
	$(bin)/python benchmarks/allreduce.py $(ARGS)
	$(bin)/python benchmarks/host.py $(ARGS)
	$(bin)/python benchmarks/messages.py
	$(bin)/python benchmarks/ddp.py
	$(bin)/python benchmarks/compression.py

lint: $(VENV)/installed-dev
	$(bin)/clang-format --dry-run -Werror $(cpp_files)
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy

format: $(VENV)/installed-dev
	$(bin)/clang-format -i $(cpp_files)
	$(bin)/ruff check --fix --exit-zero .
	$(bin)/ruff format .

clean:
	rm -rf build dist *.egg-info torch_iroh/lib torch_iroh/*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv

# ---- native code ----

# Needs the environment only for its torch. After pip has built once, this compiles what changed since.
native: $(VENV)/installed-torch
	$(MAKE) -C csrc -j$(JOBS) modules PYTHON="$(native_python)" WERROR=

# The unit tests open the iroh library themselves, and must not pass without it.
with_iroh = TORCH_IROH_REQUIRE_LIBRARY=1 \
  TORCH_IROH_LIBRARY="$$($(bin)/python -c 'from torch_iroh._native import iroh_library; print(iroh_library()[0])')"

unit: system-for-test $(VENV)/installed-test
	$(MAKE) -C csrc -j$(JOBS) unit
	$(with_iroh) build/native/unit

# TSan of GCC 12 cannot place its shadow memory under the address randomisation of newer kernels ("unexpected memory
# mapping"): setarch -R turns that off, where it exists and a container allows it.
build-sanitized: system-for-test $(VENV)/installed-test
	$(MAKE) -C csrc -j$(JOBS) unit SANITIZE=address,undefined
	$(MAKE) -C csrc -j$(JOBS) unit SANITIZE=thread

unit-sanitized: build-sanitized
	$(with_iroh) UBSAN_OPTIONS=print_stacktrace=1 build/native-address-undefined/unit
	fixed="setarch $$(uname -m) -R"; $$fixed true 2>/dev/null || fixed=; \
	$(with_iroh) TSAN_OPTIONS=suppressions=$(CURDIR)/tests/cpp/tsan.supp $$fixed build/native-thread/unit

# ---- the environment: each file below stands for a step that was done ----

system-for-build:
	@CXX="$(CXX)" scripts/check-system.sh "$(PYTHON)" build

system-for-test:
	@CXX="$(CXX)" scripts/check-system.sh "$(PYTHON)" test

$(bin)/python: | system-for-build
	"$(PYTHON)" -m venv $(VENV)

# Asked every time TORCH is named, else once.
$(VENV)/installed-torch: $(if $(TORCH),torch) | $(bin)/python
	scripts/install-torch.sh $(bin)/python "$(TORCH)"
	$(pip) install -q 'setuptools>=77'
	touch $@

$(VENV)/installed-%: $(VENV)/installed-torch pyproject.toml setup.py
	$(pip) install --no-build-isolation -e '.[$*]'
	touch $@
