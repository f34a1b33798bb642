"""The experiment that serves every placement of a config in virtual time."""

import dataclasses

from configs import elastic
from experiments.simulate import served
from pdjax import catalogue
from pdjax.core.config import Arrivals, Config, Switching
from pdjax.plan import Hardware

H100 = Hardware(catalogue.model("llama3-8b"), catalogue.chip("h100"), chips=1)


def small() -> Config:
    """More than two prefill instances can take, a shift after 100 of 160 requests, and decisions
    every half second."""
    config = elastic.get_config()
    workload = dataclasses.replace(
        config.workload,
        requests=160,
        arrivals=Arrivals(rate=25),
        phases=(dataclasses.replace(config.workload.phases[0], at=100),),
    )
    return config.replace(workload=workload, switching=Switching("slo", every_s=0.5))


def test_one_that_switches_goes_to_where_it_is_needed_and_fixed_ones_stay():
    config = small()
    fixed, switching = (
        served(config, name, H100.cost(config, config.placements[name]), [0])
        for name in ("2P2D", "2P2D switching")
    )
    assert fixed.changes == () and fixed.requests == 160 and len(fixed.phases) == 2
    share, low, high = fixed.attained
    assert low < share < high
    assert round(share * 160) == round(fixed.phases[0] * 100 + fixed.phases[1] * 60)
    first = switching.changes[0]
    assert (first.instance, first.does) == ("decode/0", "prefill")
    assert first.began_s < first.ended_s  # it had something to finish
    assert switching.attained[0] > fixed.attained[0]
