"""A load that shifts to and fro every ten seconds, faster than instances can follow it.

    python -m experiments.simulate --config=configs/alternating.py --seeds=1

As configs/elastic.py, with 140 requests of the one kind, then 140 of the other, four times. Within
both objectives, of 1120 requests: 2P2D 89.0 %, 3P1D 18.8 %, 2P2D switching 55.7 %, which answers
to the phase that has just ended. About a minute.
"""

import dataclasses

from configs import elastic
from pdjax.core.config import Config, Phase

LENGTH = 140


def get_config() -> Config:
    config = elastic.get_config()
    load = config.workload
    long_prompts = Phase(0, load.prompt, load.output)
    kinds = [long_prompts, load.phases[0]] * 4
    phases = tuple(dataclasses.replace(kind, at=LENGTH * i) for i, kind in enumerate(kinds))
    return config.replace(
        name="alternating",
        workload=dataclasses.replace(load, requests=LENGTH * len(kinds), phases=phases[1:]),
    )
