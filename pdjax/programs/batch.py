"""What a step is given: chunks of prompts, slots that decode. Host arrays, made anew per step."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pdjax.programs.sampling import Given, Sampling

SMALLEST_BUCKET = 16


class Chunks(NamedTuple):
    """Chunks of C prompts, padded to T tokens: row c has length_C[c], from start_C[c] on."""

    tokens_CT: Given
    table_Cn: Given
    start_C: Given
    length_C: Given
    sampling: Sampling


class Slots(NamedTuple):
    """B slots. A slot's newest token is at position_B; it is fresh_B where is_fresh_B (the request
    just joined), else what the step before sampled, which need not be on the host yet. count_B is
    how many tokens the slot wants, 0 for an empty slot."""

    table_Bn: Given
    position_B: Given
    count_B: Given
    fresh_B: Given
    is_fresh_B: Given
    sampling: Sampling


def no_sampling(rows: int) -> Sampling:
    """Greedy for every row."""
    return Sampling(
        np.zeros(rows, np.float32),
        np.ones(rows, np.float32),
        np.zeros(rows, np.int32),
        np.zeros(rows, np.uint32),
        np.zeros(rows, np.int32),
    )


def no_chunks(rows: int, tokens: int, empty_table_n: np.ndarray) -> Chunks:
    """Rows without tokens, to be filled in."""
    start_C, length_C = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    tokens_CT = np.zeros((rows, tokens), np.int32)
    table_Cn = np.tile(empty_table_n, (rows, 1))
    return Chunks(tokens_CT, table_Cn, start_C, length_C, no_sampling(rows))


def no_slots(slots: int, empty_table_n: np.ndarray) -> Slots:
    """Empty slots, to be filled in."""
    position_B, count_B, fresh_B = (np.zeros(slots, np.int32) for _ in range(3))
    table_Bn = np.tile(empty_table_n, (slots, 1))
    is_fresh_B = np.zeros(slots, bool)
    return Slots(table_Bn, position_B, count_B, fresh_B, is_fresh_B, no_sampling(slots))


# --- Buckets: the few shapes that programs are compiled for ---------------------------------


def token_bucket(tokens: int) -> int:
    """The padded length of a chunk: a power of two, or one and a half times one from 96 on, so
    that padding costs at most a third of a chunk."""
    bucket = SMALLEST_BUCKET
    while bucket < tokens:
        if bucket >= 64 and bucket * 3 // 2 >= tokens:
            return bucket * 3 // 2
        bucket *= 2
    return bucket


def row_bucket(rows: int) -> int:
    return 1 << (rows - 1).bit_length()


def chunk_buckets(prompt_lens: Sequence[int], chunk: int, prefills: int) -> list[int]:
    """Every token bucket that a chunk of such prompts can need. Where prompts share a step's
    budget of `chunk` tokens a chunk can have any length up to it."""
    longest = min(max(prompt_lens, default=1), chunk)
    if prefills > 1:
        lengths = set(range(1, longest + 1))
    else:
        lengths = {min(n, chunk) for n in prompt_lens} | {n % chunk for n in prompt_lens} - {0}
    return sorted({token_bucket(n) for n in lengths})
