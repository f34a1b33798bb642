"""What a model is, in numbers: sizes, rotary embedding, and the architectures we know by name.

No arrays of a framework here: cost models and tokenizers read this too.
"""

from dataclasses import dataclass

import numpy as np


class ModelError(ValueError):
    """A model that cannot be built or read; the message says what to change."""


@dataclass(frozen=True)
class Architecture:
    """Sizes and choices of one model, in the letters of the dimension key.

    rope_scaling: what each of the H / 2 rotary frequencies is divided by (see `linear_rope` and
        `llama3_rope`); empty for plain rotary embedding.
    window: a token attends to the newest `window` tokens, itself included; None for all.
    context: most tokens of a text the model was made for. eos: token ids that end a text.
    """

    name: str
    V: int
    D: int
    F: int
    L: int
    N: int
    K: int
    H: int
    rope_theta: float = 10000.0
    rope_scaling: tuple[float, ...] = ()
    norm_eps: float = 1e-5
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    context: int = 2048
    eos: tuple[int, ...] = ()

    def __post_init__(self):
        for letter in (*"VDFLNKH", "context"):
            if getattr(self, letter) < 1:
                raise ModelError(
                    f"`{letter}` of `{self.name}` is {getattr(self, letter)}; need >= 1"
                )
        if self.N % self.K:
            raise ModelError(
                f"`{self.name}`: N={self.N} heads do not share K={self.K} kv heads evenly"
            )
        if self.H % 2:
            raise ModelError(f"`{self.name}`: H={self.H} is odd; rotary embedding turns pairs")
        if len(self.rope_scaling) not in (0, self.H // 2):
            raise ModelError(
                f"`{self.name}`: `rope_scaling` has {len(self.rope_scaling)} values, not H / 2 = "
                f"{self.H // 2}"
            )
        if self.window is not None and self.window < 1:
            raise ModelError(f"`window` of `{self.name}` is {self.window}; None turns it off")

    @property
    def parameters(self) -> int:
        """Number of weights, each counted once."""
        D, head_rows = self.D, self.N + 2 * self.K
        attention = (head_rows + self.N) * self.H * D
        attention += head_rows * self.H * self.qkv_bias + 2 * self.H * self.qk_norm
        layer = attention + 3 * D * self.F + 2 * D
        return self.L * layer + D + self.V * D * (1 if self.tied else 2)


def rope_frequencies(theta: float, H: int) -> np.ndarray:
    """Radians per position of the H / 2 pairs (Su et al. 2021, arXiv 2104.09864, eq. 15)."""
    return 1.0 / theta ** (np.arange(0, H, 2, dtype=np.float64) / H)


def linear_rope(factor: float, H: int) -> tuple[float, ...]:
    """`rope_scaling` of position interpolation (Chen et al. 2023, arXiv 2306.15595, eq. 4)."""
    return (float(factor),) * (H // 2)


def llama3_rope(
    *, theta: float, H: int, factor: float, low: float, high: float, original_context: int
) -> tuple[float, ...]:
    """`rope_scaling` of Llama 3.1 (Meta's reference code, `apply_scaling`).

    Wavelengths above original_context / low are stretched by `factor`, those below
    original_context / high are kept, and frequencies between are interpolated.
    """
    turns = original_context * rope_frequencies(theta, H) / (2 * np.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return tuple((1 / (kept + (1 - kept) / factor)).tolist())


TINY = Architecture("tiny", V=256, D=64, F=128, L=4, N=8, K=4, H=16, context=512)

# "The Llama 3 Herd of Models", arXiv 2407.21783, table 3; V and context from Meta's model card.
_LLAMA3 = {"V": 128256, "rope_theta": 500000.0, "context": 8192, "eos": (128001, 128009)}
LLAMA3_8B = Architecture("llama3-8b", D=4096, F=14336, L=32, N=32, K=8, H=128, **_LLAMA3)
LLAMA3_70B = Architecture("llama3-70b", D=8192, F=28672, L=80, N=64, K=8, H=128, **_LLAMA3)

NAMED = {arch.name: arch for arch in (TINY, LLAMA3_8B, LLAMA3_70B)}
"""Architectures that `random:NAME` gives random weights."""
