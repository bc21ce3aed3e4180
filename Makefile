# One check, the same everywhere: `make check` is what .ci/run and the README run.

PYTHON ?= python
CODE := arbor kernels controllers verifiers tests scripts

.PHONY: help check format lint types architecture test fix bench golden docs size

help:  ## what can be made
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 14

check: format lint types architecture test  ## format, lint, types, architecture, tests

format:
	$(PYTHON) -m ruff format --check $(CODE)

lint:
	$(PYTHON) -m ruff check $(CODE)

types:  ## mypy, strict on the torch-free floors; the scripts too
	$(PYTHON) -m mypy

architecture:  ## imports go down only
	$(PYTHON) -m pytest -q tests/test_architecture.py

test:  ## the default tests; markers gpu and slow are left out
	$(PYTHON) -m pytest -q --deselect tests/test_architecture.py

fix:  ## format, and repair what the linter can
	$(PYTHON) -m ruff check --fix $(CODE)
	$(PYTHON) -m ruff format $(CODE)

bench:  ## timings of this machine, one JSON per benchmark
	@set -e; for script in scripts/bench_*.py; do echo "== $$script"; $(PYTHON) "$$script"; done

golden:  ## rewrite tests/golden from this code; review the diff
	$(PYTHON) -m pytest -q tests/test_golden.py --rewrite-golden

docs:  ## write the generated parts of docs/ from the code
	$(PYTHON) scripts/docs.py

size:  ## lines of Python per folder
	@for folder in $(CODE); do \
		printf '%-12s %6d\n' $$folder $$(find $$folder -name '*.py' -type f | xargs cat /dev/null | wc -l); \
	done
