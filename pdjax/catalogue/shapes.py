"""What a model's shape says: weights, KV, and the FLOPs of tokens. Letters as in the README.

Counts are for the whole model; pdjax.costs divides them among chips.
"""

from dataclasses import dataclass
from functools import cached_property

from pdjax.architecture import Architecture


@dataclass(frozen=True)
class Heads:
    """Attention of N query heads over K kv heads of H dimensions: multi-head where K = N, grouped
    (Ainslie et al. 2023, arXiv 2305.13245) where K < N."""

    N: int
    K: int
    H: int

    def weights(self, D: int) -> int:
        """Of the projections to q, k, v and back."""
        return 2 * D * self.H * (self.N + self.K)

    @property
    def kv_values(self) -> int:
        """Numbers cached per token and layer."""
        return 2 * self.K * self.H

    @property
    def kv_shares(self) -> int:
        """Most chips that the cache of a token can be divided among without copies."""
        return self.K

    def chunk_flops(self, start: int, length: int) -> int:
        """Scores and values, per layer, of `length` new tokens after `start`; a token sees itself
        and what is before it."""
        return 4 * self.N * self.H * _pairs(start, length)

    def decode_flops(self, context: float) -> float:
        """The same of tokens that decode and see `context` keys together."""
        return 4 * self.N * self.H * context


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): a token's cache is
    one vector of kv_rank and one rotated key of `rope`, shared by all N heads.

    Prefill unfolds keys of nope + rope and values of `value` per head; decode absorbs the
    unfolding into the query and the output, and works on the latent vectors themselves.
    """

    N: int
    query_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int

    def weights(self, D: int) -> int:
        query = D * self.query_rank + self.query_rank * self.N * (self.nope + self.rope)
        keys = D * (self.kv_rank + self.rope)
        return query + keys + self._unfolding + self.N * self.value * D

    @property
    def _unfolding(self) -> int:
        """Weights that make keys and values of a latent vector."""
        return self.kv_rank * self.N * (self.nope + self.value)

    @property
    def kv_values(self) -> int:
        return self.kv_rank + self.rope

    @property
    def kv_shares(self) -> int:
        return 1

    def chunk_flops(self, start: int, length: int) -> int:
        """As of Heads; what is cached has to be unfolded again."""
        pair = 2 * self.N * (self.nope + self.rope + self.value)
        return pair * _pairs(start, length) + 2 * self._unfolding * start

    def decode_flops(self, context: float) -> float:
        return 2 * self.N * (2 * self.kv_rank + self.rope) * context


def _pairs(start: int, length: int) -> int:
    return length * start + length * (length + 1) // 2


@dataclass(frozen=True)
class Mlp:
    """matrices: 2, or 3 where one of them gates (SwiGLU)."""

    F: int
    matrices: int = 3

    def weights(self, D: int) -> int:
        return self.matrices * D * self.F


@dataclass(frozen=True)
class Experts:
    """Routed experts in all layers but the first `dense_layers`: a token goes to `active` of
    `count`, and to `shared` ones; each is an `mlp`."""

    count: int
    active: int
    shared: int
    mlp: Mlp
    dense_layers: int

    def met(self, tokens: float) -> float:
        """Experts of a layer that `tokens` tokens go to, if every choice is as likely."""
        return self.count * (1 - (1 - self.active / self.count) ** tokens)


@dataclass(frozen=True)
class Shape:
    """A decoder-only transformer.

    vectors: weights per layer that are no matrices (norms, biases). extra: weights outside of
    layers that are neither embedding nor head. source: of all these numbers.
    """

    name: str
    V: int
    D: int
    L: int
    attention: Heads | Latent
    mlp: Mlp
    source: str
    tied: bool = False
    experts: Experts | None = None
    vectors: int = 0
    extra: int = 0

    @property
    def parameters(self) -> int:
        """Number of weights, each counted once."""
        tables = self.V * self.D * (1 if self.tied else 2)
        layers = round(self._matrices(self.experts.count if self.experts else 0))
        return layers + self.L * self.vectors + self.extra + tables

    @property
    def head_weights(self) -> int:
        """Of the projection to logits, done for sampled tokens only."""
        return self.V * self.D

    @cached_property
    def active_weights(self) -> int:
        """In matrices of the layers, per token: twice as many FLOPs."""
        return round(self._matrices(self.experts.active if self.experts else 0))

    def read_weights(self, tokens: float) -> float:
        """In the matrices that a step with so many tokens reads, the head among them."""
        return self._matrices(self.experts.met(tokens) if self.experts else 0) + self.head_weights

    def kv_token_bytes(self, value_bytes: float = 2) -> float:
        """Of one token's cache in all layers; bf16 has 2 bytes a value."""
        return self.L * self.attention.kv_values * value_bytes

    def _matrices(self, routed: float) -> float:
        """Weights in matrices of all layers, with so many routed experts per layer."""
        D, experts = self.D, self.experts
        attention = self.L * self.attention.weights(D)
        if experts is None:
            return attention + self.L * self.mlp.weights(D)
        router = D * experts.count
        each = router + (routed + experts.shared) * experts.mlp.weights(D)
        sparse = (self.L - experts.dense_layers) * each
        return attention + experts.dense_layers * self.mlp.weights(D) + sparse


def shape_of(arch: Architecture, source: str) -> Shape:
    """Of a model of the family that pdjax runs."""
    D, N, K, H = arch.D, arch.N, arch.K, arch.H
    vectors = 2 * D + (N + 2 * K) * H * arch.qkv_bias + 2 * H * arch.qk_norm
    heads, mlp = Heads(N, K, H), Mlp(arch.F)
    return Shape(
        arch.name, arch.V, D, arch.L, heads, mlp, source,
        tied=arch.tied, vectors=vectors, extra=D,
    )  # fmt: skip
