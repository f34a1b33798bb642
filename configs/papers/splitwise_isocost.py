"""Splitwise: throughput within the SLO of clusters that cost the same.

    python -m experiments.reproduce --config=configs/papers/splitwise_isocost.py

Patel et al., ISCA 2024: 86 DGX-A100 or 40 DGX-H100 and what can be split of the same cost, each
at the best of two or three splits. Published: AA best, with 1.4 times Baseline-H100. As
splitwise_isopower otherwise, conversation lengths only.
Takes three minutes of processor time; needs the traces.
"""

from pdjax.reproduce import Reproduction
from pdjax.reproduce.splitwise import iso_cost


def reproduce() -> Reproduction:
    return iso_cost()
