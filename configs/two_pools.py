"""What does separation cost before it pays? Four steps from one pool to two devices.

    python -m experiments.compare --config=configs/two_pools.py

`collocated`: one device, one scheduler, one pool. `logical_split`: prefill and decode take turns
on that device and share its pool, so that a hand-off copies nothing. `two_pools`: each has a pool
of its own on that device, so that the KV cache is copied but crosses no link. `disaggregated`: two
devices. The first three have one device and the last has two: compare neighbours.
"""

from configs import quickstart
from pdjax.core.config import Config, Pool, Role


def get_config() -> Config:
    slab = Pool(form="slab", tokens=8192)
    prefill = Role(does="prefill", chunk=512)
    prefill_slab = Role(does="prefill", chunk=512, pool=slab)
    return quickstart.get_config().replace(
        name="two_pools",
        placements={
            "collocated": {"server": Role(does="both", slots=16, chunk=512)},
            "logical_split": {
                "prefill": prefill,
                "decode": Role(does="decode", slots=16, beside="prefill", pool_of="prefill"),
            },
            "two_pools": {
                "prefill": prefill_slab,
                "decode": Role(does="decode", slots=16, beside="prefill"),
            },
            "disaggregated": {"prefill": prefill_slab, "decode": Role(does="decode", slots=16)},
        },
    )
