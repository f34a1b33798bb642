"""Named shapes: tiny ones for tests, real ones for compilers and benchmarks."""

from itertools import product
from typing import Any

from kernels_pallas.specs import Spec

_F32: dict[str, Any] = {"dtype": "float32", "q_dtype": "float32"}

# Few, and each with several features: an interpreted kernel takes seconds to compile.
TINY = (
    Spec(name="f32", B=6, S=96, K=2, G=2, H=64, **_F32),
    Spec(name="wide_softcap", B=5, S=96, K=1, G=4, H=128, page=32, softcap=5.0, **_F32),
    Spec(name="mha_window", B=5, S=160, K=4, G=1, H=64, window=37, **_F32),
    Spec(name="g8_few", B=4, T=3, S=160, K=1, G=8, H=64, **_F32),
    Spec(name="bf16_runs", B=5, S=160, K=2, G=2, H=64, run=2),
    Spec(name="int8", B=5, S=96, K=4, G=2, H=64, dtype="int8"),
    Spec(
        name="fp8_few_window",
        B=5,
        T=2,
        S=160,
        K=2,
        G=2,
        H=64,
        page=32,
        dtype="float8_e4m3fn",
        window=70,
    ),
    Spec(name="int8_p256", B=3, S=400, K=1, G=2, H=128, page=256, dtype="int8"),
)


def _decode(**sizes) -> Spec:
    """Named by what differs from Llama-3-8B: B = 32, S = 4k, G = 4, K = 8, H = 128, p = 16."""
    name = "_".join(f"{key}{value}" for key, value in sizes.items())
    return Spec(name=f"decode_{name}", **sizes)


REAL = (
    *(_decode(G=G, H=H, page=page) for G, H, page in product((1, 4, 8), (64, 128), (16, 64, 128))),
    *(_decode(B=B, S=S, page=page) for B, S, page in product((8, 128), (1024, 32768), (16, 128))),
    *(
        _decode(H=H, page=page, dtype=dtype)
        for dtype, H, page in product(
            ("float32", "int8", "float8_e4m3fn"), (64, 128), (16, 64, 128)
        )
    ),
    *(_decode(K=K, page=page) for K, page in product((1, 2, 4), (16, 128))),
    *(_decode(K=1, page=64, dtype=dtype) for dtype in ("int8", "float8_e4m3fn")),
    _decode(G=1, K=32, page=64),
    _decode(G=1, K=32, page=64, dtype="int8"),
    _decode(window=1024),
    _decode(softcap=50.0),
    _decode(T=4),
    _decode(run=8),
)
