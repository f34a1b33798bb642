"""How to divide eight chips: separate prefill from decode, or not, and in which proportion?

    python -m experiments.plan --config=configs/plan.py

Llama-3-8B on H100s, prompts of about 2000 tokens and answers of about 200, in time when the first
token comes within 0.5 s and the others every 20 ms on average. Three forms are sized: prefill and
decode on instances of their own, instances that do both (prompts first), and chunked prefill in the
steps of decode (Sarathi-Serve, OSDI 2024, with its relaxed budget of 2048 tokens). It prints, for
each size, the highest rate within the objectives with its interval, how steady the queue is there
and what ends it; and says whether to separate at all. Expect 1.07 times as much separated as
chunked, with intervals that overlap. One to two minutes.

Other questions: --model=llama3-70b, --chip=a100-80g, --chips=16, --config.slo.tpot_s=0.05.
"""

from pdjax.core.config import (
    SLO,
    Arrivals,
    Config,
    Lengths,
    Link,
    Model,
    Pool,
    Role,
    Transfer,
    Workload,
)


def get_config() -> Config:
    pool = Pool(page_size=256)
    prefill = Role(does="prefill", pool=pool, chunk=8192, prefills=8)
    return Config(
        name="plan",
        model=Model(source="", context=16384),
        placements={
            "disaggregated": {
                "prefill": prefill,
                "decode": Role(does="decode", pool=pool, slots=256, chunk=256),
            },
            "collocated": {"server": Role(pool=pool, slots=256, prefills=8, chunk=8192)},
            "chunked": {"server": Role(pool=pool, slots=256, prefills=8, chunk=2048, mixed=True)},
        },
        transfer=Transfer(schedule="layerwise", groups=4, link=Link(preset="rdma-400g")),
        workload=Workload(
            requests=700,
            arrivals=Arrivals(process="poisson"),
            prompt=Lengths(kind="lognormal", mean=2000, sigma=0.8, low=16, high=12000),
            output=Lengths(kind="lognormal", mean=200, sigma=0.7, low=2, high=2000),
        ),
        slo=SLO(ttft_s=0.5, tpot_s=0.02),
    )
