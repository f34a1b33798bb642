"""Four forms of KV memory on one device, eight requests at a time: what does each one buy?

    python -m experiments.pool_forms --config=configs/pool_forms.py

`native`: one collocated server with one paged pool. `logical_split`: prefill and decode take
turns on that device and share the pool. `two_pools`: a slab to prefill into and pages to decode
from, both on that device, so that a hand-off copies the KV. `page_classes`: the same with a decode
pool whose blocks are 8, 32 or 128 tokens. All pools grow as outputs do, 32 tokens at a time, and
as many tokens fit in all forms. Outputs are short or long: most end early, a few go on.

`python -m experiments.compare` takes this config too. A pass takes about 2 minutes on 2 cores.
"""

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

GROWTH = 32


def get_config() -> Config:
    prefill = Role(does="prefill", chunk=512, pool=Pool(form="slab", tokens=4096))
    classes = Pool(tokens=4096, page_size=8, classes=(8, 32, 128))
    return Config(
        name="pool_forms",
        model=Model(source="smollm2", context=1024),
        placements={
            "native": {"server": Role(pool=Pool(tokens=8192), growth=GROWTH)},
            "logical_split": {
                "prefill": Role(does="prefill", chunk=512, pool=Pool(tokens=8192)),
                "decode": Role(does="decode", beside="prefill", pool_of="prefill", growth=GROWTH),
            },
            "two_pools": {
                "prefill": prefill,
                "decode": Role(
                    does="decode", beside="prefill", pool=Pool(tokens=4096), growth=GROWTH
                ),
            },
            "page_classes": {
                "prefill": prefill,
                "decode": Role(does="decode", beside="prefill", pool=classes, growth=GROWTH),
            },
        },
        transfer=Transfer(schedule="layerwise", groups=5),
        workload=Workload(
            requests=32,
            arrivals=Arrivals(process="closed", concurrency=8),
            prompt=Lengths(kind="lognormal", mean=250, low=64, high=512),
            output=Lengths(kind="lognormal", mean=32, sigma=1.2, low=4, high=160),
        ),
        slo=SLO(ttft_s=2.0, tpot_s=0.15),
    )
