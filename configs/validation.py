"""Does the simulator foretell the live engine? Loads for experiments.validate.

    python -m experiments.validate --config=configs/validation.py

SmolLM2-135M in float32, collocated, chunked and 1P1D. The workload is the load that is foretold;
what the costs are fitted to has other rates, lengths and seeds.
"""

from pdjax.core.config import Arrivals, Config, Lengths, Model, Pool, Role, Transfer, Workload


def get_config() -> Config:
    slab = Pool(form="slab", tokens=8192)
    return Config(
        name="validation",
        model=Model(source="smollm2", context=1024),
        placements={
            "collocated": {"server": Role(does="both", chunk=1024)},
            "chunked": {"server": Role(does="both", chunk=128, mixed=True)},
            "disaggregated": {
                "prefill": Role(does="prefill", chunk=512, pool=slab),
                "decode": Role(does="decode"),
            },
        },
        transfer=Transfer(schedule="layerwise", groups=5),
        workload=Workload(
            requests=12,
            arrivals=Arrivals(process="poisson", rate=0.7),
            prompt=Lengths(kind="lognormal", mean=256, low=16, high=896),
            output=Lengths(kind="lognormal", mean=32, sigma=0.6, low=8, high=96),
            text="random",
        ),
    )
