"""An article's table of four forms of KV memory (A10, 7B, batch 8): does its shape hold?

    python -m experiments.reproduce --config=configs/papers/seed_pool_forms.py

The table: from one pool to a logical split, to two pools, to smaller decode blocks TTFT falls from
940 to 390 ms, TPOT from 22 to 17 ms and memory from 14.2 to 11.8 GB, and 32 requests/s become 85.
Judged are directions against the native form, simulated for both extremes of what prefill and
decode on one device cost each other; and whether the numbers can all be true at once. Not
reproducible: the numbers themselves, whose prompts, outputs and load are not stated. Takes a few
seconds. `experiments.pool_forms` measures the same forms live.
"""

from dataclasses import replace

from configs import pool_forms as live
from pdjax.reproduce import Reproduction
from pdjax.reproduce.forms import pool_forms


def reproduce() -> Reproduction:
    config = live.get_config()
    return pool_forms(config.replace(workload=replace(config.workload, requests=400)))
