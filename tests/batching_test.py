"""How prompts are cut into chunks. Pages have 3 tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.core.events import Chunk
from pdjax.core.policies.batching import Prompt, plan_chunks


@pytest.mark.parametrize(
    ("prompts", "budget", "chunks"),
    [
        ([], 6, ()),
        ([Prompt(0, 0, 5)], 6, (Chunk(0, 0, 5, True),)),  # all of it
        ([Prompt(0, 0, 6)], 6, (Chunk(0, 0, 6, True),)),  # exactly the budget
        ([Prompt(0, 0, 7)], 6, (Chunk(0, 0, 6, False),)),  # a first chunk
        ([Prompt(0, 6, 7)], 6, (Chunk(0, 6, 1, True),)),  # its last
        ([Prompt(0, 0, 9)], 8, (Chunk(0, 0, 6, False),)),  # cut down to whole pages
        # What the first leaves of the budget goes to the second, and to the third.
        (
            [Prompt(0, 0, 1), Prompt(1, 3, 5), Prompt(2, 0, 9)],
            6,
            (Chunk(0, 0, 1, True), Chunk(1, 3, 2, True), Chunk(2, 0, 3, False)),
        ),
        # 2 tokens are left: too few for a page of request 1, and nobody overtakes it.
        ([Prompt(0, 0, 4), Prompt(1, 0, 9), Prompt(2, 0, 1)], 6, (Chunk(0, 0, 4, True),)),
        # But they are enough to end request 1.
        ([Prompt(0, 0, 4), Prompt(1, 0, 2)], 6, (Chunk(0, 0, 4, True), Chunk(1, 0, 2, True))),
    ],
)
def test_chunks_fill_the_budget_first_come_first_served(prompts, budget, chunks):
    assert plan_chunks(prompts, budget=budget, page_size=3) == chunks


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    budget=st.integers(1, 6).map(lambda pages: 3 * pages),
)
def test_repeated_plans_cover_every_prompt_and_skip_none_that_waits(lengths, budget):
    done = dict.fromkeys(range(len(lengths)), 0)
    while prompts := [Prompt(rid, done[rid], n) for rid, n in enumerate(lengths) if done[rid] < n]:
        chunks = plan_chunks(prompts, budget=budget, page_size=3)
        assert chunks and sum(chunk.length for chunk in chunks) <= budget
        assert [c.rid for c in chunks] == [prompt.rid for prompt in prompts][: len(chunks)]
        for chunk in chunks:
            assert chunk.start == done[chunk.rid] and chunk.start % 3 == 0
            done[chunk.rid] += chunk.length
            assert chunk.last == (done[chunk.rid] == lengths[chunk.rid])
