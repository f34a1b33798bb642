"""Named shapes: tiny ones for tests, real ones for compilers and benchmarks. B and T are those of
`append`; `pack` and `unpack` move the n pages of one text, of LAYERS layers."""

from itertools import product

from kernels_pallas.specs import Spec

LAYERS = 2

TINY = (
    Spec(name="f32", B=4, T=1, S=64, K=2, H=64, dtype="float32", q_dtype="float32"),
    Spec(name="chunk", B=3, T=40, S=96, K=2, H=64, dtype="float32", q_dtype="float32"),
    Spec(name="bf16", B=4, T=3, S=64, K=2, H=64),
    Spec(name="int8", B=4, T=1, S=128, K=2, H=64, page=32, dtype="int8"),
    Spec(name="int8_chunk", B=2, T=40, S=128, K=4, H=64, page=32, dtype="int8"),
    Spec(name="fp8", B=4, T=3, S=128, K=2, H=64, page=32, dtype="float8_e4m3fn"),
)

REAL = (
    *(
        Spec(name=f"{dtype}_H{H}_p{page}_T{T}", B=B, T=T, H=H, page=page, dtype=dtype)
        for dtype, H, page, (B, T) in product(
            ("bfloat16", "float32", "int8", "float8_e4m3fn"),
            (64, 128),
            (16, 128),
            ((128, 1), (1, 512)),
        )
    ),
    *(Spec(name=f"bfloat16_K{K}_T1", B=32, K=K) for K in (1, 2)),
)
