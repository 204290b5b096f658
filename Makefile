# make demo, make test, make bench and make lint each work alone: they create .venv and install what they need.
# Another build of torch: make TORCH='torch==2.9.1' test        Another directory for demo and bench: make DIR=/mnt/nvme0 demo

PYTHON ?= python3
TORCH ?= torch==2.13.0
DIR ?= bench-files
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test bench lint clean

demo: $(READY)
	$(BIN)/python benchmarks/torch_save_model.py --model auto --verify --no-peers --repeat 3 --folder $(DIR)

test: $(READY)
	$(BIN)/python -m pytest

bench: $(READY)
	$(BIN)/python -m pytest benchmarks --benchmark-only

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) bench-files build *.egg-info .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache

# torch comes first and alone: left to the resolver it would be a CUDA build of several gigabytes.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet '$(TORCH)'
	$(BIN)/pip install --quiet --editable '.[dev,bench,plot]'
	touch $@
