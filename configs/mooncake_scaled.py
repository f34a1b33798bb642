"""The first 40 requests of Mooncake's conversation trace, scaled to fit SmolLM2-135M.

    python -m experiments.compare --config=configs/mooncake_scaled.py

Needs conversation_trace.jsonl: under `$PDJAX_TRACES/mooncake`, or where
`--config.workload.trace.path` says. Lengths are 1/16 of the trace's: 684 prompt and 23 output
tokens in the mean, two prompts cut to fit the context. Arrivals keep their bursts but come at 0.15
of their rate, over 80 seconds in each of three placements. Prompts that share a prefix in the
trace share one here. Bursts, not the mean rate, make the queues: expect a longer tail of TTFT
than with Poisson arrivals.
"""

import dataclasses
import os

from configs import quickstart
from pdjax.core.config import Arrivals, Config, Model, Trace, Workload


def get_config() -> Config:
    config = quickstart.get_config()
    folder = os.environ.get("PDJAX_TRACES", "../shared/traces")
    return config.replace(
        name="mooncake_scaled",
        model=Model(source="smollm2", context=2048),
        workload=Workload(
            requests=40,
            arrivals=Arrivals(process="trace"),
            trace=Trace(
                path=f"{folder}/mooncake/conversation_trace.jsonl",
                format="mooncake",
                length_scale=1 / 16,
                rate_scale=0.15,
            ),
        ),
        slo=dataclasses.replace(config.slo, ttft_s=5.0),
    )
