"""Named shapes: tiny ones for tests, real ones for compilers and benchmarks."""

from itertools import product
from typing import Any

from kernels_pallas.specs import Spec

_F32: dict[str, Any] = {"dtype": "float32", "q_dtype": "float32"}

TINY = (
    Spec(name="f32", B=4, T=32, S=144, K=2, G=2, H=64, **_F32),
    Spec(name="wide_softcap", B=3, T=24, S=160, K=1, G=4, H=128, page=32, softcap=5.0, **_F32),
    Spec(name="mha_window", B=4, T=32, S=160, K=2, G=1, H=64, window=21, **_F32),
    Spec(name="bf16_slab", B=3, T=32, S=128, K=2, G=2, H=64, run=4),
    Spec(name="int8_window", B=3, T=32, S=160, K=2, G=2, H=64, dtype="int8", window=50),
    Spec(name="fp8", B=3, T=32, S=96, K=2, G=2, H=64, page=32, dtype="float8_e4m3fn"),
)


def _chunk(**sizes) -> Spec:
    """Named by what differs from Llama-3-8B: 1 chunk, S = 4k, G = 4, K = 8, H = 128, p = 16."""
    name = "_".join(f"{key}{value}" for key, value in sizes.items())
    return Spec(name=f"chunk_{name}", **{"B": 1, **sizes})


REAL = (
    *(
        _chunk(T=T, G=G, H=H, page=page)
        for T, G, H, page in product((512, 2048), (1, 4, 8), (64, 128), (16, 128))
    ),
    *(_chunk(B=B, T=T, S=S) for B, T, S in ((4, 512, 8192), (8, 512, 4096), (1, 2048, 32768))),
    *(_chunk(T=2048, K=K) for K in (1, 2)),
    *(
        _chunk(T=512, H=H, page=page, dtype=dtype)
        for dtype, H, page in product(("float32", "int8", "float8_e4m3fn"), (64, 128), (16, 64))
    ),
    _chunk(T=2048, window=1024),
    _chunk(T=2048, softcap=50.0),
    _chunk(T=2048, run=8),
)
