"""Runs an experiment as a user does."""

import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parent.parent


def run_experiment(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, with two devices: programs of experiments/ share names of flags."""
    return subprocess.run(
        [sys.executable, "-m", f"experiments.{name}", *arguments],
        cwd=REPO,
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "2"},
        capture_output=True,
        text=True,
    )
