"""What is fitted to logs gives their times back, and the speed of steps that run together."""

import pytest

from pdjax.architecture import TINY
from pdjax.calibration import SLOWEST, calibrate, error_of, slowed_of
from pdjax.catalogue import shape_of
from pdjax.core.config import Arrivals, Config, Lengths, Link, Model, Pool, Role, Workload
from pdjax.core.events import Record
from pdjax.costs.batch import Batch, send_bytes_of
from pdjax.costs.placement import per_role
from pdjax.costs.recorded import Timed, timed_of
from pdjax.costs.roofline import Coefficients, Padding, Roofline, roofline
from pdjax.processors import Sharing, shared_processors
from pdjax.sim import simulate
from pdjax.workload import Source, make_source

SHAPE = shape_of(TINY, "here")
HIDDEN = Coefficients(
    step_s=2e-3, flop_s=1e-9, weight_byte_s=1e-9, attention_flop_s=2e-9, kv_byte_s=1e-8
)
PADDED = {
    "prefill": Padding(buckets=(16, 32, 64)),
    "decode": Padding(buckets=(16, 32, 64), slots=4),
}
POOL = Pool(tokens=2048)
PLACEMENT = {
    "prefill": Role("prefill", chunk=64, pool=POOL),
    "decode": Role("decode", slots=4, chunk=64, pool=POOL),
}
CONFIG = Config({"split": PLACEMENT}, model=Model("", context=256))


def source(seed: int, rate: float) -> Source:
    load = Workload(
        requests=60,
        arrivals=Arrivals("poisson", rate=rate),
        prompt=Lengths("lognormal", mean=60, low=8, high=200),
        output=Lengths("lognormal", mean=12, low=2, high=40),
    )
    return make_source(load, seed, encode=None, vocab=1, context=256, eos=())


def log(seed: int, rate: float, sharing: Sharing) -> list[Record]:
    """Of a server whose steps last exactly as the hidden coefficients say."""
    lines = {
        name: Roofline(name=name, coefficients=HIDDEN, padding=padding)
        for name, padding in PADDED.items()
    }
    costs = {
        name: roofline(line, SHAPE, Link(), send_bytes_of(SHAPE)) for name, line in lines.items()
    }
    cost = per_role(costs, Link())._replace(sharing=sharing)
    return list(simulate(CONFIG, "split", source(seed, rate), cost))


@pytest.mark.parametrize("speed", [0.5, 0.65, 0.9])
def test_the_speed_of_steps_together_is_found_and_foretells_other_loads(speed):
    sharing = Sharing(speed, host=True)
    logs = [log(0, 20, sharing), log(1, 60, sharing)]
    found = calibrate(logs, PLACEMENT, SHAPE, value_bytes=2, host=True)
    assert found.sharing.speed == pytest.approx(speed, abs=0.02)
    steps = slowed_of(timed_of(log(2, 40, sharing)), shared_processors(PLACEMENT, host=True))
    together = [it for it in steps if it.beside.get(1)]
    assert len(together) > 20
    assert max(abs(error_of(it, found, SHAPE)) for it in steps) < 0.03


def test_instances_with_processors_of_their_own_are_fitted_alone():
    logs = [log(0, 40, Sharing())]
    found = calibrate(logs, PLACEMENT, SHAPE, value_bytes=2, host=False)
    cost = found.cost(SHAPE, Link())
    assert cost.sharing == Sharing()
    steps = slowed_of(timed_of(logs[0]), {})
    assert max(abs(error_of(it, found, SHAPE)) for it in steps) < 0.02  # the middle one of many


def test_a_step_knows_for_how_long_how_many_ran_beside_it():
    def step(instance: str, began: int, ended: int) -> Timed:
        return Timed(instance, Batch(decodes=1, context=1), (ended - began) / 1e9, began, ended)

    steps = [step("a/0", 0, 100), step("b/0", 20, 60), step("c/0", 50, 200), step("d/0", 0, 100)]
    mine, *_, other = slowed_of(steps, {"a/0": "host", "b/0": "host", "c/0": "host"})
    assert mine.beside == pytest.approx({0: 20e-9, 1: 70e-9, 2: 10e-9})
    assert other.beside == pytest.approx({0: 100e-9})
    sharing = Sharing(0.5)  # a third of the speed beside two
    assert mine.alone_s(sharing) == pytest.approx((20 + 70 / 2 + 10 / 3) * 1e-9)


def test_of_several_iterations_one_counts():
    batch = Batch(decodes=1, context=1)
    steps = [Timed("a/0", batch, 10e-9, 0, 40), Timed("b/0", batch, 20e-9, 20, 40)]
    mine, _ = slowed_of(steps, {"a/0": "host", "b/0": "host"})
    assert mine.alone_s(Sharing(1.0)) == pytest.approx(10e-9)
    assert mine.alone_s(Sharing(0.5)) == pytest.approx(7.5e-9)
    assert SLOWEST < 0.5
