"""DistServe, figure 11: what disaggregation and the freedom of placement add, by simulation.

    python -m experiments.reproduce --config=configs/papers/distserve_fig11.py

Zhong et al., OSDI 2024, section 6.5: OPT-66B on up to 32 GPUs, 400 ms and 100 ms; DistServe-High
(any placement), DistServe-Low (KV never leaves a node), vLLM++ (any tp and stages), vLLM (tp 4).
The paper made it with its own simulator, whose assumptions are used here; published is the order.
Stand-ins: 100 published ShareGPT lengths; tp 2, 4, 8 and 1 or 2 stages of decode. What the
authors' simulator gave at five placements is beside. Takes 90 s of processor time.
"""

from pdjax.reproduce import Reproduction
from pdjax.reproduce.distserve_placements import figure_11


def reproduce() -> Reproduction:
    return figure_11()
