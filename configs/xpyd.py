"""How many instances for prefill, how many for decode?

    python -m experiments.compare --config=configs/xpyd.py

1P1D, 2P1D and 1P2D serve the same requests, sent faster than one prefill instance takes them.
Where prefill is the bottleneck the second prefill instance shortens the prefill queue and so
TTFT, and a second decode instance changes little; longer outputs turn that around
(`--config.workload.output.mean=200 --config.workload.output.high=256`). Virtual devices share
the cores of one machine, so an added instance adds no arithmetic there: with the modelled clock
(`--config.clock.kind=modelled`) each has its own.
"""

import dataclasses

from configs import quickstart
from pdjax.core.config import Arrivals, Config, Placement, Pool, Role


def _placement(prefills: int, decodes: int) -> Placement:
    slab = Pool(form="slab", tokens=8192)
    return {
        "prefill": Role(does="prefill", instances=prefills, chunk=512, pool=slab),
        "decode": Role(does="decode", instances=decodes, slots=16),
    }


def get_config() -> Config:
    config = quickstart.get_config()
    return config.replace(
        name="xpyd",
        placements={
            "1P1D": _placement(1, 1),
            "2P1D": _placement(2, 1),
            "1P2D": _placement(1, 2),
        },
        workload=dataclasses.replace(
            config.workload, arrivals=Arrivals(process="poisson", rate=1.6)
        ),
    )
