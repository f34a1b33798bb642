"""Page classes follow the lengths: little waste, few table entries."""

import subprocess
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from pdjax.core.blocks import ClassAllocator
from pdjax.core.config import Pool
from pdjax.page_classes import NoLengths, good_classes, score_classes
from pdjax.traces import read_azure, read_mooncake


def blocks_of(length: int, classes: tuple[int, ...]) -> list[int]:
    """Sizes of the blocks that a request gets in an empty pool, read off its pages."""
    page = classes[0]
    pages = ClassAllocator(4096, tuple(c // page for c in classes)).take(-(-length // page))
    sizes = []
    while pages:
        fits = [c // page for c in classes if c // page <= len(pages)]
        sizes.append(max(size for size in fits if pages[0] % size == 0))
        pages = pages[sizes[-1] :]
    return [size * page for size in sizes]


def test_costs_are_those_of_requests_in_an_empty_pool():
    lengths, entry = [1, 7, 8, 9, 40, 64, 65, 200], 1.5
    for c in score_classes(lengths, 8, count=2, entry_tokens=entry):
        blocks = [blocks_of(length, c.classes) for length in lengths]
        waste = sum(map(sum, blocks)) - sum(lengths)
        assert c.waste == pytest.approx(waste / len(lengths))
        assert c.waste_share == pytest.approx(waste / sum(map(sum, blocks)))
        assert c.entries == pytest.approx(sum(map(len, blocks)) / len(lengths))
        assert c.cost == pytest.approx(c.waste + entry * c.entries)


def test_all_choices_are_scored_and_the_cheapest_is_first():
    found = score_classes([100, 3], 8, count=2)
    assert {c.classes for c in found} == set(combinations([8, 16, 32, 64], 2))
    assert [c.cost for c in found] == sorted(c.cost for c in found)
    assert found[0].classes == good_classes([100, 3], 8, count=2)


def test_short_answers_with_some_long_ones_want_8_32_128():
    """80 % of the outputs below 10 tokens, 20 % above 100."""
    rng = np.random.default_rng(0)
    short, long = rng.integers(1, 10, 1600), rng.integers(101, 512, 400)
    assert good_classes(np.concatenate([short, long])) == (8, 32, 128)


def test_costly_entries_want_larger_blocks_and_short_requests_fewer_classes():
    lengths = range(1, 400)
    assert good_classes(lengths, entry_tokens=100)[0] > good_classes(lengths)[0]
    assert good_classes([5, 9, 17], page_size=8) == (8, 16)
    assert good_classes([5], page_size=8) == (8,)


def test_lengths_of_zero_hold_nothing():
    assert score_classes([0, 0, 33]) == score_classes([33])
    with pytest.raises(NoLengths, match="no length is above 0"):
        good_classes([0, 0])


def test_classes_chosen_for_real_traces_make_a_pool(traces: Path):
    azure = read_azure(traces / "azure2023" / "AzureLLMInferenceTrace_conv.csv")
    mooncake = read_mooncake(traces / "mooncake" / "synthetic_trace.jsonl")
    for rows in (azure, mooncake):
        classes = good_classes(row.output_len for row in rows)
        assert Pool(classes=classes, page_size=classes[0]).classes == classes == (8, 32, 128)


def test_the_command_prints_what_each_choice_wastes(tmp_path: Path):
    trace = tmp_path / "trace.jsonl"
    row = '{"timestamp": 0, "input_length": 3, "output_length": %d, "hash_ids": [0]}\n'
    trace.write_text("".join(row % n for n in (3, 6, 130)))
    command = [sys.executable, "-m", "experiments.page_classes", f"--trace={trace}"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # 5 + 2 + 6 tokens in three requests; of 152 held; 1 + 1 + 2 entries
    best = next(line for line in said.splitlines() if "8, 16, 128" in line)
    assert [cell.strip() for cell in best.split("│")[2:6]] == ["4.33", "8.55", "1.33", "5.67"]
