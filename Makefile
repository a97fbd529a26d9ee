# Every target sets itself up: it needs git, make and Python 3.11 or newer (or uv, which brings its own).
# The environment lives in .venv; a second run installs nothing.

VENV ?= .venv
PYTHON ?=
PYTEST_ARGS ?=

PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.kimi-k3-installed
COMPLETE := $(VENV)/.kimi-k3-complete

.PHONY: help setup demo test lint format bench clean

help:
	@echo "make demo    convert, verify, run and prune a small trained K3, in about a minute"
	@echo "make test    ruff, mypy and the whole test suite"
	@echo "make lint    ruff and mypy only"
	@echo "make format  let ruff rewrite the sources"
	@echo "make bench   against stock mlx-lm, cp and a plain download: speed, memory, primitives"
	@echo "make setup   only the environment in $(VENV)"
	@echo "make clean   remove the demo's output and tool caches"

setup: $(INSTALLED)

# pip and uv are quiet here, so that what the target prints is the target's own.
$(INSTALLED): pyproject.toml tools/venv.sh
	@sh tools/venv.sh "$(VENV)" "$(PYTHON)"
	@touch $@

demo: $(INSTALLED)
	@$(PY) -m kimi_k3_mlx demo --out demo

lint: $(INSTALLED)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# mlx-vlm takes its time to install; only the tests need it.
$(COMPLETE): $(INSTALLED)
	@sh tools/venv.sh "$(VENV)" "$(PYTHON)" dev,vision
	@touch $@

test: lint $(COMPLETE)
	$(PY) -m pytest -n auto $(PYTEST_ARGS)

format: $(INSTALLED)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(INSTALLED)
	@for program in model agent primitives convert hub; do \
		echo "== $$program"; $(PY) -m benchmarks.$$program || exit 1; \
	done

clean:
	rm -rf demo build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
