"""DistServe, figure 9 a and c: SLO attainment against rate per GPU, OPT-66B, two other tasks.

    python -m experiments.reproduce --config=configs/papers/distserve_fig9.py

Zhong et al., OSDI 2024. As distserve_fig8, with the SLOs of code completion (125 ms, 200 ms) and
summarisation (15 s, 150 ms). Stand-ins: no lengths are published. LongBench is drawn from what
the authors say of its preparation, HumanEval is assumed; so a rate that fits says little. Not
reproducible: DeepSpeed-MII, the machines; the SLO scales (b, d) are left out. Takes two minutes
of processor time.
"""

from pdjax.reproduce import Reproduction
from pdjax.reproduce.distserve import figure_9


def reproduce() -> Reproduction:
    return figure_9()
