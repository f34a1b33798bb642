"""Deciding, measuring and reporting work without jax: importing them does not load it."""

import json
import pkgutil
import subprocess
import sys

import pdjax

# The only parts of pdjax that may load jax; whatever else there is or will be must not.
COMPUTES = tuple(
    f"pdjax.{name}" for name in ("programs", "engine", "experiment", "aot", "calibration")
)

# Imports one module after the other and prints the first that brought jax in.
PROGRAM = """
import importlib, json, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
    if {"jax", "jaxlib", "flax", "orbax"} & set(sys.modules):
        sys.exit(name)
"""


def _first_that_loads_jax(names: list[str]) -> str:
    command = [sys.executable, "-c", PROGRAM, json.dumps(names)]
    return subprocess.run(command, capture_output=True, text=True).stderr.strip()


def test_what_decides_measures_and_reports_leaves_jax_unloaded():
    names = [module.name for module in pkgutil.walk_packages(pdjax.__path__, "pdjax.")]
    names = ["pdjax", *(name for name in names if not name.startswith(COMPUTES))]
    assert {"pdjax.core.config", "pdjax.core.loop", "pdjax.workload", "pdjax.metrics"} <= set(names)
    assert _first_that_loads_jax([*names, "experiments.flags"]) == ""


def test_a_module_that_loads_jax_is_named():
    assert _first_that_loads_jax(["pdjax.core.config", "jax"]) == "jax"
