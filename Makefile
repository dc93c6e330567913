# Each target sets up what it needs in .venv and re-uses it. Versions come from requirements/constraints.txt alone.
# On Linux PyPI's torch is the CUDA build. For the CPU build: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo
PYTHON ?= python3
export PIP_CONSTRAINT := $(CURDIR)/requirements/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# compiled modules are kept, also where the environment says otherwise: a child of a test starts in three quarters of the time
export PYTHONDONTWRITEBYTECODE :=
BIN := .venv/bin

SLOW := slow or compile or interpreter or process or browser
PYTEST := $(BIN)/pytest --numprocesses 2 --dist worksteal

.PHONY: help demo setup test test-slow test-all soak docs lint format clean

help:
	@echo "make demo    train small networks on digits and look inside: runs/demo/report.html"
	@echo "make setup   the package and its development tools in .venv"
	@echo "make test    linters, types and the default tests: at most five minutes on two cores"
	@echo "make test-slow   the tests marked slow, compile, interpreter, process or browser, with coverage"
	@echo "make test-all    both"
	@echo "make soak    the long run: every promise of reliability many times over; AREA=crash for one area of it"
	@echo "make docs    the documentation as a site, in site/"
	@echo "make lint    ruff and mypy"
	@echo "make format  let ruff rewrite the files"
	@echo "make clean   remove what the other targets made"

# a stamp a set of extras: what is installed is not asked for again
.venv/.%: pyproject.toml requirements/constraints.txt
	@test -x $(BIN)/pip || $(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit( \
		"dmst needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + ". Name another one: PYTHON=python3.12 make $(MAKECMDGOALS)")'
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[$*]'
	@touch $@

setup: .venv/.dev

demo: .venv/.demo
	$(BIN)/dmst demo

test: setup lint
	$(PYTEST) -m "not ($(SLOW))"

test-slow: setup
	$(PYTEST) -m "$(SLOW)" --cov --cov-fail-under=75  # 78 % by these tests alone

test-all: test test-slow

soak: setup
	$(BIN)/python -m soak $(AREA)

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html; its search wants a server: python -m http.server --directory site"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv dist build site .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
