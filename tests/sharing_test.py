"""How transfers share what they cross: rates against tables worked out by hand, against another way
to fill pipes, and against what has to hold for every set of transfers."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdjax.links import End, max_min, one_at_a_time
from pdjax.links.sharing import Path


def paths_of(pairs: Sequence[str], sizes: dict[str, float] | None = None) -> list[Path]:
    """A path per word: its letters are ends, of 12 bytes/s if `sizes` does not say."""
    letters = sorted(set("".join(pairs)))
    ends = {letter: End(letter, (sizes or {}).get(letter, 12.0)) for letter in letters}
    return [tuple(ends[letter] for letter in pair) for pair in pairs]


@pytest.mark.parametrize(
    ("pairs", "rates"),
    [
        (["ax"], [12]),
        (["ax", "ay"], [6, 6]),  # they share the way out of a
        (["ax", "bx"], [6, 6]),  # they share the way into x
        (["ax", "by"], [12, 12]),
        (["ax", "bx", "cx"], [4, 4, 4]),
        # x takes three, so b has 8 left of its way out for y.
        (["ax", "bx", "cx", "by"], [4, 4, 4, 8]),
        # ... of which d takes as much: y is the tighter end.
        (["ax", "bx", "cx", "by", "dy"], [4, 4, 4, 6, 6]),
        (["ax", "ay", "az", "bz", "cz"], [4, 4, 4, 4, 4]),
        (["ax", "ay", "by"], [6, 6, 6]),
        # s is a spine: four of them have 3 each, and what is within a node has the rest of its end.
        (["asx", "asy", "bsx", "csz", "dw"], [3, 3, 3, 3, 12]),
        (["asx", "bsy", "ax"], [6, 6, 6]),
        (["", "ax"], [float("inf"), 12]),  # what crosses nothing has no limit
    ],
)
def test_rates_are_the_max_min_fair_ones(pairs, rates):
    assert max_min(paths_of(pairs)) == pytest.approx(rates)


@pytest.mark.parametrize(
    ("pairs", "rates"),
    [
        (["ax", "ay", "bx", "bz"], [12, 0, 0, 0]),  # b waits for x, and z for b
        (["ax", "by", "ay", "cz"], [12, 12, 0, 12]),
        (["ax", "", "ax"], [12, float("inf"), 0]),
    ],
)
def test_one_at_a_time_an_end_is_for_whoever_was_first(pairs, rates):
    assert one_at_a_time(paths_of(pairs)) == rates


def test_the_tightest_end_of_a_path_is_its_rate():
    assert one_at_a_time(paths_of(["asx"], {"a": 5.0, "s": 3.0})) == [3.0]
    assert max_min(paths_of(["asx"], {"a": 5.0, "s": 3.0})) == [3.0]


LETTERS = "abcdefgh"
PATHS = st.lists(
    st.lists(st.sampled_from(LETTERS), min_size=1, max_size=3, unique=True).map("".join),
    min_size=1,
    max_size=12,
)
SIZES = st.fixed_dictionaries({letter: st.sampled_from([0, 1, 2, 3, 5, 8]) for letter in LETTERS})


def poured(paths: Sequence[Path]) -> list[Fraction]:
    """Water-filling by brute force: a drop for every path that has room, until none has."""
    drop = Fraction(1, 27720)  # divides evenly by up to 12 paths
    ends = {end for path in paths for end in path}
    level, rates = dict.fromkeys(ends, Fraction(0)), [Fraction(0)] * len(paths)
    flowing = list(range(len(paths)))
    while flowing:
        step = {end: sum(end in paths[i] for i in flowing) * drop for end in ends}
        # As many whole rounds at once as fit everywhere, which is at least one.
        room = {end: Fraction(end.bytes_per_s) - level[end] for end in ends}
        rounds = min(room[end] // d for end, d in step.items() if d)
        if rounds == 0:
            full = {end for end, d in step.items() if d and room[end] < d}
            flowing = [i for i in flowing if not full & set(paths[i])]
            continue
        for end, d in step.items():
            level[end] += rounds * d
        for i in flowing:
            rates[i] += rounds * drop
    return rates


@given(PATHS, SIZES)
def test_rates_are_those_of_filling_drop_by_drop(words, sizes):
    paths = paths_of(words, sizes)
    assert max_min(paths) == pytest.approx([float(rate) for rate in poured(paths)], abs=2e-3)


@given(PATHS, SIZES)
def test_every_path_has_a_full_end_where_nobody_has_more(words, sizes):
    """Which is what max-min fairness means; no end carries more than it can."""
    paths = paths_of(words, sizes)
    rates = max_min(paths)
    at: dict[End, list[float]] = {}
    for path, rate in zip(paths, rates, strict=True):
        for end in path:
            at.setdefault(end, []).append(rate)
    assert all(sum(mine) <= end.bytes_per_s + 1e-9 for end, mine in at.items())
    for path, rate in zip(paths, rates, strict=True):
        assert any(
            sum(at[end]) >= end.bytes_per_s - 1e-9 and rate >= max(at[end]) - 1e-9 for end in path
        )


@given(PATHS, SIZES)
def test_one_at_a_time_nobody_shares_and_nobody_waits_for_one_who_came_later(words, sizes):
    paths = paths_of(words, dict(sizes) | {letter: size + 1 for letter, size in sizes.items()})
    rates = one_at_a_time(paths)
    crossing = [i for i, rate in enumerate(rates) if rate]
    assert all(not set(paths[i]) & set(paths[j]) for i, j in combinations(crossing, 2))
    for i, path in enumerate(paths):
        before = any(set(path) & set(paths[j]) for j in range(i))
        assert (rates[i] > 0) == (not before)
