"""A calibration of the tiny model: what is measured is fitted, held out, written and read back."""

import json
import subprocess
from pathlib import Path
from statistics import fmean

import pytest
from experiment_process import run_experiment

from pdjax.architecture import TINY
from pdjax.catalogue import shape_of
from pdjax.costs.batch import Batch
from pdjax.costs.roofline import read_roofline

# Roles of one placement with tp of their own, as a config file of a user would have it.
CONFIG = """
from pdjax.core.config import Config, Model, Role

def get_config():
    roles = {"prefill": Role("prefill", chunk=32, tp=%d), "decode": Role("decode", slots=2)}
    return Config({"split": roles}, model=Model("random:tiny", context=64))
"""


def calibrate(folder: Path, tp: int) -> subprocess.CompletedProcess[str]:
    config = folder / "config.py"
    config.write_text(CONFIG % tp)
    arguments = [f"--config={config}", "--placement=split", f"--json={folder / 'out.json'}"]
    return run_experiment("calibrate", *arguments, "--repeats=2", "--outputs=4")


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("calibrate")
    done = calibrate(folder, tp=1)
    assert done.returncode == 0, done.stderr
    return folder / "out.json"


@pytest.fixture(scope="module")
def samples(path) -> list[tuple[Batch, float]]:
    return [
        (Batch(tuple(map(tuple, s["chunks"])), s["decodes"], s["context"]), s["seconds"])
        for s in json.loads(path.read_text())["samples"]
    ]


def test_the_loads_have_chunks_first_and_later_and_every_number_of_decodes(samples):
    chunks = {chunk for batch, _ in samples for chunk in batch.chunks}
    assert {(0, 16), (0, 32), (32, 31)} <= chunks
    assert {batch.decodes for batch, _ in samples if not batch.chunks} == {1, 2}
    assert all(seconds > 0 for _, seconds in samples)


def test_no_shape_is_there_twice(samples):
    shapes = [batch for batch, _ in samples]
    assert len(set(shapes)) == len(shapes)


def test_the_roofline_knows_the_engines_padding_and_the_sizes_it_was_fitted_on(path, samples):
    line = read_roofline(path)
    assert line.padding.slots == 2 and line.padding.buckets == (16, 32)
    assert line.weight_bytes == line.kv_bytes == 4  # float32
    fitted = [batch for batch, _ in samples[::2]]
    contexts = [batch.context / batch.decodes for batch in fitted if batch.decodes]
    assert line.domain["context per request"] == (min(contexts), max(contexts))


def test_errors_are_those_of_the_shapes_that_were_held_out(path, samples):
    line, shape = read_roofline(path), shape_of(TINY, "here")
    errors = [100 * (line.seconds(shape, batch) / s - 1) for batch, s in samples[1::2]]
    said = json.loads(path.read_text())
    rows = {row["what"]: row for row in said["rows"]}
    assert rows["all: held-out shapes"]["value"] == len(errors)
    assert rows["all: bias"]["value"] == pytest.approx(fmean(errors))
    assert rows["all: mean absolute error"]["value"] == pytest.approx(fmean(map(abs, errors)))
    assert said["meets_goals"] is all(row["met"] is not False for row in said["rows"])
    assert "cores" in said["setting"]["machine"]


def test_phases_with_different_tp_are_refused_in_one_line(tmp_path):
    done = calibrate(tmp_path, tp=2)
    assert done.returncode == 2
    assert (
        done.stderr.strip()
        .splitlines()[-1]
        .startswith("error: `split` prefills with tp 2 and decodes with tp 1: calibrate")
    )
