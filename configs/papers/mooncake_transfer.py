"""Mooncake's table of measured KV transfers between two nodes, from 128 to 32,768 tokens.

    python -m experiments.reproduce --config=configs/papers/mooncake_transfer.py

Published in Mooncake's documentation (vLLM with its transfer engine: Qwen3-8B, TP 8, H800, eight
ConnectX-7, one request at a time). Sizes follow from the model's shape. Latency and bandwidth of
the link are fitted to the shortest and the longest prompt; the seven between are predictions, each
to be within 10 %. Not reproducible: the TTFT column, which is their H800's. Takes a second.
"""

from pdjax.reproduce import Reproduction
from pdjax.reproduce.links import mooncake_transfer


def reproduce() -> Reproduction:
    return mooncake_transfer()
