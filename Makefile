# Nothing but Python >= 3.11, make and git is needed: the first target run makes .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
INSTALLED := .venv/.installed
# Two processes of one thread each: torch's own threads would only fight over the same two cores, and with a third one
# emulated clusters of real processes come too late on a machine that does something else besides.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint docs pages walkthrough check bench soak structure scripts attack netlab

help:
	@echo "make demo       train on four real processes, one 4x slower, beside what the simulator predicts"
	@echo "make test       the whole test suite"
	@echo "make lint       lint, format and types"
	@echo "make docs       the pages of docs/ as a site in site/; a broken link is an error"
	@echo "make pages      every page, table and picture of docs that a script writes, anew"
	@echo "make walkthrough  README and the first tutorial, followed in a fresh clone with empty caches"
	@echo "make check      lint, format, types and the fast tests"
	@echo "make bench      every benchmark; results go to benchmarks/results/"
	@echo "make soak       the slow and the long-running tests"
	@echo "make attack     attacks on runs of this host, as another user and by every mishap; needs root"
	@echo "make netlab     train on three hosts of a lab on this machine, by join and on Ray (two servers), over 100 Mbit/s; needs root"
	@echo "make scripts    the loops of tests/scripts: alone, on four processes and on eight virtual workers"
	@echo "make structure  sizes, names, imports and walks through the source, beside an earlier revision"

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "paceline needs Python 3.11 or later, not " + sys.version.split()[0] + ": make PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[all,dev,bench,docs]'
	$(BIN)/python -m compileall -q -j 0 .venv/lib || true  # what pip does with one core; some packages bring broken files
	touch $@

demo: $(INSTALLED)
	$(BIN)/python examples/demo.py

test: $(INSTALLED)
	$(PYTEST)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

pages: $(INSTALLED)
	$(BIN)/python docs/reference/write_settings.py
	$(BIN)/python docs/tools/write_commands.py
	$(BIN)/python docs/tools/write_pictures.py
	$(BIN)/python docs/tools/write_results.py
	$(BIN)/python docs/tools/write_publications.py
	$(BIN)/python benchmarks/quote.py

walkthrough: $(INSTALLED)
	$(BIN)/python benchmarks/walkthrough.py
	$(BIN)/python docs/tools/write_results.py

check: lint
	$(PYTEST) -m "not slow"

bench: $(INSTALLED)
	set -e; for bench in benchmarks/bench_*.py; do echo "== $$bench"; $(BIN)/python "$$bench"; done

soak: $(INSTALLED)
	$(BIN)/python benchmarks/soak.py

structure: $(INSTALLED)
	$(BIN)/python benchmarks/structure.py

scripts: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/scripts_table.py

attack: $(INSTALLED)
	$(BIN)/python benchmarks/attack.py

netlab: $(INSTALLED)
	$(BIN)/python benchmarks/netlab_demo.py
	$(BIN)/python benchmarks/netlab_demo.py --ray --servers 2
