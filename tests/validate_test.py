"""The validation serves loads live, simulates those that it did not fit, and keeps its logs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parent.parent


def validate(folder: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own: programs of experiments/ share names of flags."""
    overrides = ["workload.requests=6", "workload.arrivals.rate=100"]
    return subprocess.run(
        [
            *(sys.executable, "-m", "experiments.validate", "--config=configs/tiny.py"),
            *(f"--config.{override}" for override in overrides),
            *("--rounds=1", f"--workdir={folder}", f"--json={folder / 'out.json'}"),
        ],
        cwd=REPO,
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "2"},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("validate")
    done = validate(folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_placement_has_its_errors_with_their_signs(folder):
    rows = {row["what"]: row for row in json.loads((folder / "out.json").read_text())["rows"]}
    for placement in ("collocated", "chunked", "logical_split", "two_pools", "disaggregated"):
        for name in ("mean TTFT", "p99 TTFT", "mean TPOT", "p99 TPOT", "mean E2E", "p99 E2E"):
            signed = rows[f"{placement}: {name}, signed error"]["value"]
            assert rows[f"{placement}: {name}, error"]["value"] == abs(signed)
    assert 0.3 <= rows["disaggregated: speed of each of two steps that run together"]["value"] <= 1
    assert (folder / "validation.svg").exists()


def test_what_is_served_is_not_served_again(folder):
    logs = {path: path.stat().st_mtime_ns for path in folder.glob("*/*.jsonl")}
    assert len(logs) == 5 * 3
    assert validate(folder).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in logs} == logs
