"""A decode pool that is too small: reserve, recompute, send back to prefill, or swap?

    python -m experiments.compare --config=configs/pressure.py

All placements are 1P1D with a decode pool of 1,280 tokens. `reserve` lets a request in when all of
its output has room, so few decode at once. The others let it in with room for 16 more tokens, and
take pages from the youngest when that is not enough: its KV is computed again on the decode
instance (`recompute`), it goes back through prefill (`return`), or its KV waits in host memory
(`swap`). Expect the others to decode more at once and to pay for it with what the report's
section on interruptions counts. Takes about 5 minutes on 2 cores.
"""

from dataclasses import replace

from pdjax.core.config import (
    SLO,
    Arrivals,
    Config,
    Lengths,
    Model,
    Pool,
    Role,
    Transfer,
    Workload,
)


def get_config() -> Config:
    prefill = Role(does="prefill", chunk=512, pool=Pool(form="slab", tokens=8192))
    reserve = Role(does="decode", chunk=512, slots=16, pool=Pool(tokens=1280))
    grow = replace(reserve, growth=16)
    return Config(
        name="pressure",
        model=Model(source="smollm2", context=1024),
        placements={
            "reserve": {"prefill": prefill, "decode": reserve},
            "recompute": {"prefill": prefill, "decode": replace(grow, preempt="recompute")},
            "return": {"prefill": prefill, "decode": replace(grow, preempt="return")},
            "swap": {
                "prefill": prefill,
                "decode": replace(grow, preempt="swap", swap_tokens=8192),
            },
        },
        transfer=Transfer(schedule="layerwise", groups=5),
        workload=Workload(
            requests=20,
            arrivals=Arrivals(process="poisson", rate=2.0),
            prompt=Lengths(kind="lognormal", mean=150, low=64, high=320),
            output=Lengths(kind="lognormal", mean=100, low=32, high=240),
        ),
        slo=SLO(ttft_s=2.0, tpot_s=0.2),
    )
