"""Mooncake, figure 9 and table 2: how much of its traces a cache of a given size hits.

    python -m experiments.reproduce --config=configs/papers/mooncake_fig9.py

Exact: the released traces through the cache that our pools have (LRU over chained blocks of 512
tokens), one pool, requests one after the other. Figure 9 reads 41 % (conversation) and 46 %
(synthetic) of the highest hit rate at 3 million tokens and about all of it at 50 million; expect 37
and 48 %, and all. Table 2's cache ratios (40 and 66 %) are a few percent above what an infinite
cache finds in the released traces (36.6 and 64.0 % of blocks): not reproducible. The third trace
is not at hand. Beside them another count of the same traces, with plain LRU from 1,000 to 100,000
blocks, which is met to 0.1 points. Takes half a minute.
"""

from pdjax.reproduce import Reproduction
from pdjax.reproduce.mooncake import fig9


def reproduce() -> Reproduction:
    return fig9()
