"""Do long prompts stop other people's tokens? Decode gaps (ITL) with and without separation.

    python -m experiments.compare --config=configs/separation.py

Short chats decode while prompts of up to 1,800 tokens arrive. `collocated` computes a prompt
between two decode steps; `chunked` puts 128 of its tokens beside each; `two_pools` gives each
phase a program and a pool of its own on one device; `disaggregated` gives each a device of its
own. On one machine all of them share the same cores: what separation can win here is only that
nobody waits for a whole prompt. Takes about 7 minutes on 2 cores; README has what was measured.
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
    decode = Role(does="decode", slots=8)
    slab = Role(does="prefill", chunk=512, pool=Pool(form="slab", tokens=8192))
    return Config(
        name="separation",
        model=Model(source="smollm2", context=2048),
        placements={
            "collocated": {"server": Role(does="both", chunk=2048)},
            "chunked": {"server": Role(does="both", chunk=128, mixed=True)},
            "two_pools": {
                "prefill": slab,
                "decode": Role(does="decode", slots=8, beside="prefill"),
            },
            "disaggregated": {"prefill": slab, "decode": decode},
        },
        transfer=Transfer(schedule="layerwise", groups=5),
        workload=Workload(
            requests=32,
            arrivals=Arrivals(process="poisson", rate=0.5),
            prompt=Lengths(kind="lognormal", mean=500, sigma=1.2, low=16, high=1800),
            output=Lengths(kind="lognormal", mean=48, low=16, high=96),
        ),
        slo=SLO(ttft_s=5.0, tpot_s=0.15),
    )
