"""The validation serves loads live, simulates those that it did not fit, and keeps its logs."""

import json
import subprocess
from pathlib import Path

import pytest
from experiment_process import run_experiment


def validate(folder: Path) -> subprocess.CompletedProcess[str]:
    return run_experiment(
        "validate",
        "--config=configs/tiny.py",
        "--config.workload.requests=6",
        "--config.workload.arrivals.rate=100",
        "--rounds=1",
        f"--workdir={folder}",
        f"--json={folder / 'out.json'}",
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
