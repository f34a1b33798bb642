"""Sarathi-Serve: how the token budget trades TTFT for the tail of TBT, and what that gains.

    python -m experiments.reproduce --config=configs/papers/sarathi_budget.py

Agrawal et al., OSDI 2024: Mistral-7B on an A100, chunked prefill with budgets of 256 to 2048
tokens against whole prompts that stall decodes: the baseline of disaggregation (1P1D, beside).
Reproduced: the order over budgets, and the gain in capacity under the strict SLO (2.6 in the
abstract). Stand-ins: a roofline instead of the authors' kernels, lengths through published
quantiles. Not reproducible: times, larger models on pipelines. Takes two minutes of processor
time.
"""

from pdjax.reproduce import Reproduction
from pdjax.reproduce.sarathi import budgets


def reproduce() -> Reproduction:
    return budgets()
