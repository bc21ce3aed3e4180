# One check, the same everywhere: `make check` is the README's test command; .ci/run adds `make slow`.

PYTHON ?= python
CODE := arbor kernels controllers verifiers examples tests scripts

# Processes that run tests; each holds torch and one model. A process that runs out of tests takes
# half of another's, so the long tests of one file do not end up last in one process.
WORKERS ?= auto
PARALLEL := -n $(WORKERS) --maxprocesses 8 --dist worksteal

# Every process that a test starts would compile arbor again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help check format lint types architecture test slow without fix native emulate sanitize sanitize-threads bench golden docs extras size

EMULATED := build/libarbor_native_emulated.so
SANITIZED := build/libarbor_native_sanitized.so
THREADS_SANITIZED := build/libarbor_native_threads.so

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 18

check: format lint types test  ## format, lint, types, tests

format:
	$(PYTHON) -m ruff format --check $(CODE)

lint:
	$(PYTHON) -m ruff check $(CODE)

types:  ## mypy, strict on the torch-free floors; the scripts too
	$(PYTHON) -m mypy --num-workers auto

architecture:  ## imports go down only
	$(PYTHON) -m pytest -q tests/test_architecture.py

test:  ## the default tests; markers gpu and slow are left out
	$(PYTHON) -m pytest -q $(PARALLEL)

slow:  ## the tests too long for every run; PART=2/6: the third of six parts of them
	$(PYTHON) -m pytest -q $(PARALLEL) -m "slow and not gpu" $(if $(PART),--slow-part $(PART))

without:  ## each folder of papers and integrations taken out of a copy, which has to work; PART=2/6
	$(PYTHON) scripts/without.py --quick --each $(if $(PART),--part $(PART))

fix:  ## format, and repair what the linter can
	$(PYTHON) -m ruff check --fix $(CODE)
	$(PYTHON) -m ruff format $(CODE)

native:  ## compile the native kernels of this checkout; installing arbor does so too
	$(PYTHON) kernels/csrc/build.py

emulate:  ## the native kernels of every x86-64 instruction set, on any CPU; needs SIMD Everywhere
	$(PYTHON) kernels/csrc/build.py --emulate --output $(EMULATED)
	ARBOR_NATIVE_FILE=$(abspath $(EMULATED)) ARBOR_NATIVE=avx2 $(PYTHON) -m pytest -q $(PARALLEL) -m "" -k instruction_set tests/test_blocks.py tests/test_native.py tests/test_native_choice.py

sanitize:  ## the native kernels' tests under the address and undefined-behaviour sanitizers
	$(PYTHON) kernels/csrc/build.py --sanitize memory --output $(SANITIZED)
	LD_PRELOAD="$$($${CXX:-g++} -print-file-name=libasan.so)" ASAN_OPTIONS=detect_leaks=0 \
		ARBOR_NATIVE_FILE=$(abspath $(SANITIZED)) $(PYTHON) -m pytest -q tests/test_native.py tests/test_native_choice.py tests/test_blocks.py tests/test_rotary.py tests/test_int8.py tests/test_head_sets.py tests/test_head_budgets.py

sanitize-threads:  ## the tests that use several threads under the thread sanitizer
	$(PYTHON) kernels/csrc/build.py --sanitize threads --output $(THREADS_SANITIZED)
	LD_PRELOAD="$$($${CXX:-g++} -print-file-name=libtsan.so)" \
		TSAN_OPTIONS="ignore_noninstrumented_modules=1 exitcode=66" \
		ARBOR_NATIVE_FILE=$(abspath $(THREADS_SANITIZED)) $(PYTHON) -m pytest -q tests/test_native.py -k threads

bench:  ## timings of this machine, one JSON per benchmark
	@set -e; for script in scripts/bench_*.py; do echo "== $$script"; $(PYTHON) "$$script"; done

golden:  ## rewrite tests/golden from this code; review the diff
	$(PYTHON) -m pytest -q tests/test_golden.py --rewrite-golden

docs:  ## write the generated parts of docs/ from the code
	$(PYTHON) scripts/docs.py

extras:  ## resolve all extras together with pip; needs an index, installs nothing
	$(PYTHON) -m pip install --quiet --dry-run --ignore-installed \
		".[adapters,cuda,gguf,hub,inspect,lm-eval,math,parquet,ray,server,structured,trl]"

size:  ## lines of Python per folder
	@for folder in $(CODE); do \
		printf '%-12s %6d\n' $$folder $$(find $$folder -name '*.py' -type f | xargs cat /dev/null | wc -l); \
	done
