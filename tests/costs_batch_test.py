"""What cost models see of a step, and what several of them make of a placement."""

import numpy as np
import pytest
from costs_helpers import LINK, decode, mixed, no_bytes, prefill

from pdjax.catalogue import chip, model
from pdjax.core.config import Clock
from pdjax.core.events import Decode, Send, Step
from pdjax.cost import Cost, affine
from pdjax.costs.batch import Batch, CostError, batches, send_bytes_of, step_ns_by
from pdjax.costs.distserve import distserve
from pdjax.costs.placement import per_role
from pdjax.costs.roofline import Roofline, on_chip, roofline
from pdjax.costs.table import Grid, Table, table


def send(group: int = 0, groups: int = 1, length: int = 10, source: str = "p/0") -> Send:
    return Send(0, 0, source, "d/0", start=3, length=length, group=group, groups=groups)


@pytest.mark.parametrize(
    ("step", "seen"),
    [
        (prefill((0, 5), (4, 3)), [Batch(((0, 5), (4, 3)), 0, 0)]),
        (decode(8, 21), [Batch((), 2, 29)]),
        (mixed((4, 3), 8, 21), [Batch(((4, 3),), 2, 29)]),
        (decode(8, 21, steps=3), [Batch((), 2, 29), Batch((), 2, 31), Batch((), 2, 33)]),
        # The second request ends after the first iteration and takes its 21 keys along.
        (decode(8, 21, counts=(2, 1), steps=3), [Batch((), 2, 29), Batch((), 1, 9), Batch()]),
    ],
)
def test_a_step_is_one_batch_per_iteration(step, seen):
    assert list(batches(step)) == seen


def test_k_iterations_last_to_the_nanosecond_as_long_as_k_steps():
    step_ns = step_ns_by(lambda batch: (batch.context + batch.decodes) * 1e-9 / 3)
    singly = [step_ns(decode(7 + k, 100 + k)) for k in range(50)]
    assert step_ns(decode(7, 100, steps=50)) == sum(singly)


def test_pieces_of_all_groups_have_the_bytes_of_the_tokens():
    send_bytes = send_bytes_of(model("llama3-8b"))  # 32 layers, 128 KiB per token
    assert send_bytes(send()) == 10 * 128 * 1024
    assert [send_bytes(send(group, 3)) for group in range(3)] == [
        10 * 4096 * 11, 10 * 4096 * 11, 10 * 4096 * 10,
    ]  # fmt: skip
    assert send_bytes_of(model("llama3-8b"), 1)(send()) == 10 * 64 * 1024


def test_every_role_has_its_own_cost_and_pieces_their_sources_size():
    fast, slow = (Cost(lambda step, t=t: t, lambda send, t=t: 10 * t) for t in (1, 2))
    cost = per_role({"p": fast, "d": slow}, LINK)
    assert (cost.step_ns(prefill((0, 5))), cost.step_ns(decode(3))) == (1, 2)
    assert cost.send_bytes(send()) == 10 and cost.send_bytes(send(source="d/0.host")) == 20
    assert cost.link == LINK


def test_a_role_without_a_cost_is_named():
    cost = per_role({"p": Cost(lambda step: 1, no_bytes)}, LINK)
    with pytest.raises(CostError, match="no cost for the role `d`; there are p"):
        cost.step_ns(decode(3))


def _open_step() -> Step:
    """Five iterations of three requests."""
    decodes = tuple(Decode(i, i, position, 5) for i, position in enumerate((7, 900, 65)))
    return Step(0, "d/0", decodes=decodes, steps=5, open=True)


@pytest.mark.parametrize("name", ["distserve", "roofline", "table", "per role", "affine"])
def test_iterations_of_an_open_step_last_as_single_steps(name):
    llama, grid = model("llama3-8b"), Grid((1, 8), (1, 2000), ((0.1, 0.3), (0.2, 0.7)))
    of_chip = Roofline(name="H100", coefficients=on_chip(chip("h100")), tp=2)
    cost = {
        "distserve": distserve("opt-13b", 1, LINK, no_bytes),
        "roofline": roofline(of_chip, llama, LINK, no_bytes),
        "table": table(Table("measured", grid, grid), LINK, no_bytes),
        "per role": per_role({"d": roofline(of_chip, llama, LINK, no_bytes)}, LINK),
        "affine": affine(Clock("modelled"), LINK, no_bytes),
    }[name]
    singly = cost._replace(decode_ns=None)  # by step_ns of every iteration
    assert cost.ends_ns(_open_step()).tolist() == singly.ends_ns(_open_step()).tolist()
    assert cost.ends_ns(_open_step()).dtype == np.int64
