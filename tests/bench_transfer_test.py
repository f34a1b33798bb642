"""The transfer benchmark's file has every way of KV beside what it is compared with."""

import itertools
import json

import pytest
from absl import flags

from experiments import bench_transfer
from pdjax.core.policies.transfer import SCHEDULES
from pdjax.programs.transports import TRANSPORTS


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> dict:
    path = tmp_path_factory.mktemp("bench") / "bench.json"
    given = flags.FLAGS
    given(["bench_transfer", "--tokens=32", "--turns=1", f"--json={path}"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_transfer, "TP", ((1, 2), (4, 4)))
        # Its own JSON is tested where it is made, and takes seconds.
        patch.setattr(bench_transfer.bench_blocks, "rows", lambda: [])
        patch.setattr(bench_transfer, "setup_devices", lambda count: None)
        with bench_transfer.jax.transfer_guard_device_to_device("allow"):
            bench_transfer.main()
    return json.loads(path.read_text())


def test_every_transport_stands_beside_device_put_and_only_device_put_has_to_be_as_fast(said):
    values = {row["what"]: row for row in said["rows"]}
    ways = itertools.product(
        (*TRANSPORTS, "jax.device_put"), ("1 to 2", "4 to 4"), ("whole", "8 groups")
    )
    for name, tp, groups in ways:
        what = f"{name}, tp {tp}, {groups}"
        assert values[what]["unit"] == "GB/s" and values[what]["value"] > 0
        over = values[f"{what}, over jax.device_put"]
        assert over["goal"] == (">= 0.95" if name == "device_put" else "")
        assert over["met"] is (None if not over["goal"] else over["value"] >= 0.95)
    assert values["memcpy"]["value"] > 0
    assert said["meets_goals"] is all(row["met"] is not False for row in said["rows"])


def test_what_a_request_waits_for_is_the_closed_form_without_a_queue(said):
    values = {row["what"]: row["value"] for row in said["rows"]}
    times = {
        schedule: [
            values[f"modelled, {schedule}, 4 groups: {what}"]
            for what in ("wire", "exposed", "closed form")
        ]
        for schedule in SCHEDULES
    }
    wire, exposed, closed = times["whole"]
    assert exposed == closed == wire
    for schedule in ("chunkwise", "layerwise"):
        wire, exposed, closed = times[schedule]
        assert exposed == pytest.approx(closed, rel=0.02) and exposed < wire
    assert times["streaming"][1] < times["layerwise"][1] < times["chunkwise"][1]
