"""A load that shifts: which fixed split is best, and does one that follows the load do better?

    python -m experiments.simulate --config=configs/elastic.py

Four H100 serve Llama-3-8B in virtual time. The first half of the requests have long prompts and
short answers, the second half short prompts and long answers; every fixed split is wrong for one of
them. `2P2D switching` begins as 2P2D and moves an instance when all of one side miss their
objective and the other has slack (`--config.switching.policy=slo`). 4 to 7 minutes on one core.

Within both objectives, of 3 x 3000 requests: 1P3D 0.3 %, 2P2D 21.8 %, 3P1D 55.1 %, switching
78.3 %. It went to 3P1D after 9 to 18 s, and to 1P3D in two steps, 20 s and 50 to 65 s after the
shift: Dynamo's rule moves one instance at a time, and only once objectives are missed. Where the
load shifts faster than that it loses: see configs/alternating.py.
"""

import dataclasses

from pdjax.core.config import (
    SLO,
    Arrivals,
    Config,
    Lengths,
    Link,
    Model,
    Phase,
    Placement,
    Pool,
    Role,
    Switching,
    Transfer,
    Workload,
)

POOL = Pool(tokens=400_000, page_size=256)
PREFILL = Role(does="prefill", pool=POOL, chunk=8192, prefills=8, slots=128)
DECODE = Role(does="decode", pool=POOL, chunk=8192, prefills=8, slots=128)


def _placement(prefills: int, decodes: int, *, switches: bool = False) -> Placement:
    return {
        "prefill": dataclasses.replace(PREFILL, instances=prefills, switches=switches),
        "decode": dataclasses.replace(DECODE, instances=decodes, switches=switches),
    }


def get_config() -> Config:
    half = 1500
    return Config(
        name="elastic",
        model=Model(source="", context=16384),
        placements={
            "1P3D": _placement(1, 3),
            "2P2D": _placement(2, 2),
            "3P1D": _placement(3, 1),
            "2P2D switching": _placement(2, 2, switches=True),
        },
        transfer=Transfer(schedule="layerwise", groups=4, link=Link(preset="rdma-400g")),
        switching=Switching(policy="slo", every_s=1.0, cooldown_s=5.0),
        workload=Workload(
            requests=2 * half,
            arrivals=Arrivals(process="poisson", rate=14.0),
            prompt=Lengths(kind="lognormal", mean=6000, sigma=0.6, low=16, high=12000),
            output=Lengths(kind="lognormal", mean=64, sigma=0.6, low=2, high=2000),
            phases=(
                Phase(
                    half,
                    Lengths(kind="lognormal", mean=500, sigma=0.6, low=16, high=12000),
                    Lengths(kind="lognormal", mean=1200, sigma=0.6, low=2, high=4000),
                ),
            ),
        ),
        slo=SLO(ttft_s=1.0, tpot_s=0.02),
    )
