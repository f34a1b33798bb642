"""SmolLM2-135M on two devices: two collocated servers, or one for prefill and one for decode?

    python -m experiments.compare --config=configs/quickstart.py

Every placement has two devices and serves the same 20 requests, sent at random (Poisson) times:
`collocated` runs whole prompts between decode steps, `chunked` puts at most 128 prompt tokens
beside the decodes of a step, `disaggregated` gives each phase a device of its own and sends the
KV cache across, five groups of layers one after the other. Expect the collocated tail of ITL to
be as long as a prefill, the chunked one shorter, and the disaggregated one not to see prefills
other than through what the two virtual devices share: the cores of one machine. Takes about 3
minutes on 2 cores, one of them compiling.
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
        name="quickstart",
        model=Model(source="smollm2", context=1024),
        placements={
            "collocated": {"server": Role(does="both", instances=2, chunk=512)},
            "chunked": {"server": Role(does="both", instances=2, chunk=128, mixed=True)},
            "disaggregated": {
                "prefill": Role(does="prefill", chunk=512, pool=Pool(form="slab", tokens=8192)),
                "decode": Role(does="decode", slots=16),
            },
        },
        transfer=Transfer(schedule="layerwise", groups=5),
        workload=Workload(
            requests=20,
            arrivals=Arrivals(process="poisson", rate=0.8),
            prompt=Lengths(kind="lognormal", mean=250, low=64, high=512),
            output=Lengths(kind="lognormal", mean=40, low=4, high=128),
        ),
        slo=SLO(ttft_s=2.0, tpot_s=0.15),
    )
