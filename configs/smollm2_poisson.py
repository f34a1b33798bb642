r"""The quickstart's placements for longer, at a rate that you set.

    python -m experiments.compare --config=configs/smollm2_poisson.py \
        --config.workload.arrivals.rate=1

200 requests take at least 200 / rate seconds in each of three placements. Raise the rate from
0.25 on: the placement whose attainment of the objectives falls last has the higher goodput.
"""

import dataclasses

from configs import quickstart
from pdjax.core.config import Arrivals, Config


def get_config() -> Config:
    config = quickstart.get_config()
    workload = dataclasses.replace(
        config.workload, requests=200, arrivals=Arrivals(process="poisson", rate=0.5)
    )
    return config.replace(name="smollm2_poisson", workload=workload)
