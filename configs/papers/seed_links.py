"""KV sizes and transfer times as an introductory article on cluster-level PD gives them, corrected.

    python -m experiments.reproduce --config=configs/papers/seed_links.py

The article: 4096 bytes per token and layer, 256 MB for 2048 tokens; 0.28 ms over NVLink, 5.1 ms
over 400 Gb/s GPUDirect, more than 50 ms over TCP. Sizes come from the models' shapes, times from
the link model of the simulator at line rate. Expect it to be right on RDMA and TCP, and wrong by
two on NVLink (900 GB/s count both directions) and by four on a multi-head 7B. Takes a second.
"""

from pdjax.reproduce import Reproduction
from pdjax.reproduce.links import seed_links


def reproduce() -> Reproduction:
    return seed_links()
