"""What a client asks for."""

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a request's tokens are chosen and when it ends.

    `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off. `stop_tokens` are token ids,
    the last of which is emitted; `stop` are strings that end the text when they appear in it.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()

    def __post_init__(self):
        if self.temperature < 0:
            raise ValueError(f"`temperature` is {self.temperature}; it must be >= 0 (0 is greedy)")
        if self.top_k < 0:
            raise ValueError(f"`top_k` is {self.top_k}; it must be >= 0 (0 is off)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"`top_p` is {self.top_p}; it must be in (0, 1] (1 is off)")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"`seed` is {self.seed}; it must be in [0, 2**32)")


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request. `id` is ours and unique; `client_id` is the client's and need not be.

    Decisions use `prompt_len` only. `prompt` (token ids) is for the engine: a simulated
    request, or one read back from a log, leaves it empty. Times are nanoseconds of the run.
    `blocks` are the chained hashes of the prompt's whole blocks and `tail` the tokens after them,
    both as core.prefix makes them, for a prefix cache; empty where there is none.
    """

    id: int
    arrival_ns: int
    prompt_len: int
    sampling: SamplingParams
    client_id: str = ""
    prompt: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    tail: tuple[int, ...] = ()

    @property
    def max_tokens(self) -> int:
        return self.sampling.max_tokens

    @property
    def cache_len(self) -> int:
        """Most tokens whose K and V are ever stored: the last token is never fed back."""
        return self.prompt_len + self.max_tokens - 1
