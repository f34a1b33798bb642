"""Two-turn chats behind one system prompt: what does a prefix cache save, and does separation
lose its hits?

    python -m experiments.compare --config=configs/chats.py
    python -m experiments.compare --config=configs/chats.py --config.cache.remote=false

Every prompt begins with the same 192 tokens, and the second turn of a conversation repeats its
first turn and the answer to it. `collocated` finds all of that in its one pool. In `disaggregated`
the answer's KV lies in the decode pool only: the prefill instance loads it from there (remote), and
the hand-off skips what the decode pool still has (target). Expect the same hit rate in both, and
with `cache.remote=false` a lower one on the prefill side. Takes about 3 minutes on 2 cores.
"""

from pdjax.core.config import (
    SLO,
    Arrivals,
    Cache,
    Config,
    Lengths,
    Model,
    Pool,
    Role,
    Transfer,
    Workload,
)


def get_config() -> Config:
    pool = Pool(tokens=16384)
    return Config(
        name="chats",
        model=Model(source="smollm2", context=1024),
        placements={
            "collocated": {"server": Role(does="both", chunk=512, pool=pool)},
            "disaggregated": {
                "prefill": Role(does="prefill", chunk=512, pool=pool),
                "decode": Role(does="decode", pool=pool),
            },
        },
        transfer=Transfer(schedule="layerwise", groups=5),
        cache=Cache(prefix=True, block=16),
        workload=Workload(
            requests=16,
            turns=2,
            think_s=2.0,
            shared=192,
            arrivals=Arrivals(process="poisson", rate=0.5),
            prompt=Lengths(kind="lognormal", mean=260, low=208, high=360),
            output=Lengths(kind="lognormal", mean=40, low=16, high=80),
        ),
        slo=SLO(ttft_s=2.0, tpot_s=0.15),
    )
