"""DistServe, figure 8, upper row: SLO attainment against rate per GPU, OPT-13B and OPT-66B.

    python -m experiments.reproduce --config=configs/papers/distserve_fig8.py

Zhong et al., OSDI 2024. Reproduced: the rates at which DistServe and vLLM cross 90 % joint
attainment, from the authors' fits of iteration times, their placements, batch limits, KV memory,
SLOs and numbers of requests; then the same with 100, 1,000 and 3,000 requests per point, which
shows what the published numbers (300 and 200) hide; and beside, all that their simulator gave.
Stand-ins: of the ShareGPT lengths only 100 are published; they are drawn with replacement. Not
reproducible: OPT-175B (no fits), DeepSpeed-MII (no fits), the machines. Takes three minutes of
processor time.
"""

from pdjax.reproduce import Reproduction
from pdjax.reproduce.distserve import figure_8


def reproduce() -> Reproduction:
    return figure_8()
