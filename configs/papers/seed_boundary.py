"""Where PD stops paying, as an introductory article draws the line, and where a simulation does.

    python -m experiments.reproduce --config=configs/papers/seed_boundary.py

The article: not worth it for prompts below 256 tokens, for models below 1B parameters or on a
single node; best above 8K tokens with 7B to 70B. Simulated on H100 for 0.6B, 8B and 70B, prompts
of 128 to 16K tokens and three links: goodput of the best of 1P3D, 2P2D and 3P1D over that of four
collocated instances, prompts first or chunked. Expect the two "does not pay" on short prompts and
small models to hold, gains from 1K tokens on at 70B (1.6 x at 16K) and hardly any at 8B, the same
within one node as over RDMA, and nothing over 10 Gb/s TCP. Objectives are a choice that moves the
line: they are in the notes. Takes about a minute.
"""

from pdjax.reproduce import Reproduction
from pdjax.reproduce.boundary import boundary


def reproduce() -> Reproduction:
    return boundary()
