"""When does the wire start to hurt? One request after the other, over slower and slower links.

    python -m experiments.link_sweep --config=configs/links.py

A prompt of 448 tokens is prefilled on one device, in one chunk, and its KV (20 MB in float32, five
layer groups) goes to another over an emulated link; the next request comes when the last one has
ended, so that nothing queues and what a request waits for after its prefill is the wire. The sweep
sends it whole after the prefill, layer group by layer group during it, and streaming into the first
decode step. Expect no difference where the wire is fast against the prefill (every preset, on
a CPU), and from bytes / prefill time downward all of them to be as slow as the wire.

`--config.clock.kind=modelled` gives the same with times of the config's affine model, exactly.
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


def get_config() -> Config:
    return Config(
        name="links",
        model=Model(source="smollm2", context=1024),
        placements={
            "disaggregated": {
                "prefill": Role(does="prefill", chunk=512, pool=Pool(form="slab", tokens=2048)),
                "decode": Role(does="decode", slots=2, pool=Pool(tokens=2048)),
            },
        },
        transfer=Transfer(groups=5),
        workload=Workload(
            requests=5,
            arrivals=Arrivals(process="closed", concurrency=1),
            prompt=Lengths(mean=448),
            output=Lengths(mean=8),
        ),
        slo=SLO(ttft_s=5.0, tpot_s=0.5),
    )
