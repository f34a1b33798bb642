"""Splitwise: throughput within the SLO of clusters that draw the same power.

    python -m experiments.reproduce --config=configs/papers/splitwise_isopower.py

Patel et al., ISCA 2024: 70 DGX-A100 or 40 DGX-H100 as they are, and split into prompt and token
machines (AA, HH, HA, HHcap), llama2-70b, Azure's conversation and code lengths drawn independently.
Reproduced from the authors' measured step times, twice: read as measured, and as their own
simulator reads them (decode time by number of requests on an axis of tokens, a link of 200 GiB/s
for 200 Gb/s). Published are 2.15 (AA) and 1.18 (HA) over Baseline-A100, that all split designs beat
both baselines, and the abstract's 2.35. Stand-ins: a fifth of each cluster. Not reproducible: power
as drawn, bars without published values. Takes three minutes of processor time; needs the traces.
"""

from pdjax.reproduce import Reproduction
from pdjax.reproduce.splitwise import iso_power


def reproduce() -> Reproduction:
    return iso_power()
