"""Mooncake, figure 5: mean TTFT under four schedulers of prefill.

    python -m experiments.reproduce --config=configs/papers/mooncake_fig5.py

Published: random 19.65 s, load balance 5.27 s, local-cache-aware 3.58 s, global-cache-aware 3.07 s.
Simulated with the routers `random`, `fewest_tokens`, and `shortest_ttft` (algorithm 1) without and
with loads from other pools. The order is what can be judged: the paper states neither trace nor
load. Stand-ins: the conversation trace at its own times, 8 prefill and 8 decode nodes of 8 A800,
Llama-3-70B by a roofline. Takes about a minute.
"""

from pdjax.reproduce import Reproduction
from pdjax.reproduce.mooncake import fig5


def reproduce() -> Reproduction:
    return fig5()
