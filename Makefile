# Every target makes the virtual environment that it needs. Another interpreter: make test PYTHON=python3.12

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2

BIN := $(VENV)/bin
READY := $(VENV)/.ready
SOURCES := autopart tests examples benchmarks

.PHONY: demo test soak lint format clean

demo: $(READY)
	$(BIN)/autopart demo

# A seeded sample of everything: the same tests and the same drawn examples each time.
test: $(READY)
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

# Everything, with many more drawn examples, new ones each time.
soak: $(READY)
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal --soak

lint: $(READY)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy --strict autopart
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean:
	rm -rf $(VENV) build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "autopart needs Python 3.11 or newer, for example: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
