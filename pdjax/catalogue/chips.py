"""Chips: what one of them computes, holds, reads and sends.

All numbers are the makers' peaks. FLOP/s are dense (data sheets of NVIDIA print twice as much, for
2:4 sparsity), bytes are not bits, and links count one way only (data sheets count both).
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """flops: bf16, dense, per second. link_bytes_per_s: to the chips of its own scale-up domain
    (NVLink, all ICI links together; PCIe where there is neither), one way."""

    name: str
    flops: float
    hbm_bytes: float
    hbm_bytes_per_s: float
    link_bytes_per_s: float
    source: str

    @property
    def ridge(self) -> float:
        """FLOPs per byte of memory at which neither waits for the other (Williams et al. 2009,
        "Roofline", CACM 52(4))."""
        return self.flops / self.hbm_bytes_per_s


_CHIPS = (
    Chip(
        "a100-80g", 312e12, 80e9, 2.039e12, 300e9,
        "NVIDIA A100 80GB SXM data sheet (624 sparse; NVLink 600 GB/s both ways)",
    ),
    Chip(
        "a800", 312e12, 80e9, 2.039e12, 200e9,
        "NVIDIA A800 80GB SXM data sheet: an A100 with NVLink of 400 GB/s both ways",
    ),
    Chip(
        "h100", 989e12, 80e9, 3.35e12, 450e9,
        "NVIDIA H100 SXM data sheet (1979 sparse; NVLink 900 GB/s both ways)",
    ),
    Chip(
        "h200", 989e12, 141e9, 4.8e12, 450e9,
        "NVIDIA H200 SXM data sheet (1979 sparse); link: MLPerf 4.1 system file, 18 NVLinks, "
        "900 GB/s both ways",
    ),
    Chip(
        "h20", 148e12, 96e9, 4.0e12, 450e9,
        "NVIDIA H20 SXM data sheet (148 dense; NVLink 900 GB/s both ways)",
    ),
    Chip(
        "b200", 2250e12, 180e9, 7.7e12, 900e9,
        "AIConfigurator 0.12 systems/b200_sxm.yaml (NVIDIA: 4500 sparse; NVLink 1.8 TB/s both "
        "ways)",
    ),
    Chip(
        "l40s", 362e12, 48e9, 0.864e12, 32e9,
        "NVIDIA L40S data sheet (733 sparse); no NVLink: PCIe 4.0 x16, 32 GB/s one way",
    ),
    Chip(
        "a10", 125e12, 24e9, 0.6e12, 32e9,
        "NVIDIA A10 data sheet (250 sparse); no NVLink: PCIe 4.0 x16, 32 GB/s one way",
    ),
    Chip(
        "v5e", 197e12, 16e9, 0.819e12, 180e9,
        "Cloud TPU v5e page; link: scaling book, 4 ICI links of 45 GB/s one way",
    ),
    Chip(
        "v5p", 459e12, 95e9, 2.765e12, 540e9,
        "Cloud TPU v5p page; link: scaling book, 6 ICI links of 90 GB/s one way",
    ),
    Chip(
        "v6e", 918e12, 32e9, 1.638e12, 360e9,
        "Cloud TPU v6e page (Trillium); link: scaling book, 4 ICI links of 90 GB/s one way",
    ),
    Chip(
        "tpu7x", 2300e12, 192e9, 7.4e12, 540e9,
        "scaling book, TPU7x; 6 ICI links (3-D torus) of 90 GB/s one way",
    ),
)  # fmt: skip

CHIPS: Mapping[str, Chip] = {chip.name: chip for chip in _CHIPS}
"""By name. PCIe and NVL variants of A100 and H100 have other numbers and are not here."""
