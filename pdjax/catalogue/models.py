"""Models that papers on serving measure, by their published shapes."""

from collections.abc import Mapping

from pdjax.architecture import Architecture
from pdjax.catalogue.shapes import Experts, Heads, Latent, Mlp, Shape, shape_of

_OPT = "OPT, arXiv 2205.01068, table 1; vocabulary and positions: facebook/opt-* config.json"
_LLAMA2 = "Llama 2, arXiv 2307.09288, table 1; sizes: meta-llama/Llama-2-* config.json"
_LLAMA3 = "The Llama 3 Herd of Models, arXiv 2407.21783, table 3"
_QWEN3 = "Qwen3, arXiv 2505.09388, table 1; sizes: Qwen/Qwen3-* config.json"
_BLOOM = "BLOOM, arXiv 2211.05100, table 3; vocabulary: bigscience/bloom config.json"
_DEEPSEEK = "DeepSeek-V3, arXiv 2412.19437, section 4.2; vocabulary: its config.json"


def _opt(name: str, L: int, D: int, N: int) -> Shape:
    """Multi-head, biases everywhere, norms with bias, learned positions (2 of them unused)."""
    F, V, positions = 4 * D, 50272, 2050
    return Shape(
        name, V, D, L, Heads(N, N, D // N), Mlp(F, 2), _OPT,
        tied=True, vectors=9 * D + F, extra=positions * D + 2 * D,
    )  # fmt: skip


def _llama2(name: str, L: int, D: int, F: int, N: int, K: int) -> Shape:
    return shape_of(Architecture(name, V=32000, D=D, F=F, L=L, N=N, K=K, H=128), _LLAMA2)


def _llama3(name: str, L: int, D: int, F: int, N: int) -> Shape:
    return shape_of(Architecture(name, V=128256, D=D, F=F, L=L, N=N, K=8, H=128), _LLAMA3)


def _qwen3(name: str, L: int, D: int, F: int, N: int) -> Shape:
    arch = Architecture(name, V=151936, D=D, F=F, L=L, N=N, K=8, H=128, qk_norm=True)
    return shape_of(arch, _QWEN3)


def _bloom_176b() -> Shape:
    """Multi-head with ALiBi; as OPT, but without positions and with a norm after the embedding."""
    D, N = 14336, 112
    return Shape(
        "bloom-176b", 250880, D, 70, Heads(N, N, D // N), Mlp(4 * D, 2), _BLOOM,
        tied=True, vectors=13 * D, extra=4 * D,
    )  # fmt: skip


def _deepseek_v3() -> Shape:
    """Without the module that predicts a second token (14B more). A layer has four norms; that
    every router has a bias per expert is counted in `extra`."""
    D, L, dense, experts = 7168, 61, 3, 256
    attention = Latent(N=128, query_rank=1536, kv_rank=512, nope=128, rope=64, value=128)
    return Shape(
        "deepseek-v3", 129280, D, L, attention, Mlp(18432), _DEEPSEEK,
        experts=Experts(experts, active=8, shared=1, mlp=Mlp(2048), dense_layers=dense),
        vectors=2 * D + attention.query_rank + attention.kv_rank,
        extra=D + (L - dense) * experts,
    )  # fmt: skip


_MODELS = (
    _opt("opt-13b", L=40, D=5120, N=40),
    _opt("opt-66b", L=64, D=9216, N=72),
    _opt("opt-175b", L=96, D=12288, N=96),
    _llama2("llama2-7b", L=32, D=4096, F=11008, N=32, K=32),
    _llama2("llama2-13b", L=40, D=5120, F=13824, N=40, K=40),
    _llama2("llama2-70b", L=80, D=8192, F=28672, N=64, K=8),
    _llama3("llama3-8b", L=32, D=4096, F=14336, N=32),
    _llama3("llama3-70b", L=80, D=8192, F=28672, N=64),
    _qwen3("qwen3-8b", L=36, D=4096, F=12288, N=32),
    _qwen3("qwen3-32b", L=64, D=5120, F=25600, N=64),
    _bloom_176b(),
    _deepseek_v3(),
)

MODELS: Mapping[str, Shape] = {model.name: model for model in _MODELS}
"""By name."""
