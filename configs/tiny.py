"""A random model of four layers under every placement: does it all run?

    python -m experiments.compare --config=configs/tiny.py

Its numbers say nothing about a real model. In float32 every placement gives the same tokens.
"""

import dataclasses

from pdjax.core.config import Arrivals, Config, Lengths, Model, Pool, Role, Transfer, Workload


def get_config() -> Config:
    pages = Pool(tokens=512, page_size=8)
    slab = Pool(form="slab", tokens=512, page_size=8)
    server = Role(does="both", slots=4, chunk=64, pool=pages)
    prefill = Role(does="prefill", chunk=16, pool=pages)
    decode = Role(does="decode", slots=4, chunk=16, pool=pages)
    return Config(
        name="tiny",
        model=Model(source="random:tiny", context=128),
        placements={
            "collocated": {"server": server},
            "chunked": {"server": Role(does="both", slots=4, chunk=16, mixed=True, pool=pages)},
            "logical_split": {
                "prefill": prefill,
                "decode": Role(
                    does="decode",
                    slots=4,
                    chunk=16,
                    pool=pages,
                    beside="prefill",
                    pool_of="prefill",
                ),
            },
            "two_pools": {
                "prefill": prefill,
                "decode": dataclasses.replace(decode, beside="prefill"),
            },
            "disaggregated": {
                "prefill": Role(does="prefill", chunk=16, pool=slab),
                "decode": decode,
            },
        },
        transfer=Transfer(groups=2),
        workload=Workload(
            requests=8,
            arrivals=Arrivals(process="poisson", rate=20),
            prompt=Lengths(kind="lognormal", mean=24, low=4, high=96),
            output=Lengths(kind="lognormal", mean=8, low=1, high=24),
            text="random",
        ),
    )
