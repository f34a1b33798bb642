"""How fast lines are: published line rates, and what a config makes of them."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from pdjax.core.link import Line


class Speed(NamedTuple):
    """One way, per instance and direction: bytes (not bits) a second, and seconds."""

    bytes_per_s: float
    latency_s: float


PRESETS: Mapping[str, Speed] = {
    "nvlink3": Speed(300e9, 10e-6),
    "nvlink4": Speed(450e9, 10e-6),
    "nvlink5": Speed(900e9, 10e-6),
    "ici-v5e": Speed(45e9, 1e-6),
    "ici-v5p": Speed(90e9, 1e-6),
    "pcie4": Speed(31.5e9, 4e-6),
    "pcie5": Speed(63e9, 4e-6),
    "rdma-200g": Speed(25e9, 2e-6),
    "rdma-400g": Speed(50e9, 2e-6),
    "rdma-800g": Speed(100e9, 2e-6),
    "tcp-10g": Speed(1.25e9, 30e-6),
}
"""Line rates, one way; transports reach 0.65 (NVLink) to 0.9 (InfiniBand) of them (calculon's A100
settings), so set `bytes_per_s` to what yours does. Latencies are small-message orders of magnitude.

nvlink3, nvlink4, nvlink5: A100's 12, H100's 18 links at 25 GB/s and B200's 18 at 50 GB/s one way
    (NVIDIA's 600, 900 and 1,800 GB/s count both); 10 us is AIConfigurator's point-to-point latency.
ici-v5e, ici-v5p: one of a chip's four (six) links, 45 (90) GB/s one way, about 1 us a hop (Google's
    scaling book); those of v6e and tpu7x are as fast as v5p's.
pcie4, pcie5: 16 and 32 GT/s times 16 lanes times 128/130; 4 us is the best pair that p2pmark's
    author measured.
rdma-200g, rdma-400g, rdma-800g: the line rate of HDR, NDR and XDR InfiniBand; 2 us for verbs over
    two switches.
tcp-10g: the line rate; 30 us is half of a round trip of 60 us through two kernels.
"""


def resolve(line: Line) -> Speed:
    """What a config's line comes to: a preset with what the config overrides; without either,
    infinitely fast."""
    bytes_per_s, latency_s = PRESETS.get(line.preset, Speed(math.inf, 0.0))
    return Speed(line.bytes_per_s or bytes_per_s, line.latency_s or latency_s)
