"""What hypothesis draws for the tests of any run: placements, options and requests, all so small
that memory is always short and prompts are often the same."""

import dataclasses
import os

from decision_helpers import PAGE, PLACEMENTS, both, decode, pool, prefill
from hypothesis import settings
from hypothesis import strategies as st
from switching_helpers import wild

from pdjax.core.config import SLO, Cache, Placement, Recovery, Role, Switching

# The same examples in every run, so that CI fails only where the code changed. With
# PDJAX_MANY=20 twenty times as many, and others in each run.
MANY = int(os.environ.get("PDJAX_MANY", "1"))
BOUNDED = settings(derandomize=MANY == 1, deadline=None)

KINDS = PLACEMENTS | {
    "2 collocated": {"server": both(instances=2)},
    "2P2D": {"prefill": prefill(instances=2), "decode": decode(instances=2)},
}
LEASE_NS = 25


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Any kind, with pools that one request may fill and features switched on or off."""
    kind = KINDS[draw(st.sampled_from(sorted(KINDS)))]
    lag, steps = draw(st.integers(0, 1)), draw(st.integers(1, 3))
    growth, how = draw(st.integers(0, 4)), draw(st.sampled_from(["recompute", "return", "swap"]))

    shared = any(role.pool_of for role in kind.values())

    def vary(role: Role) -> Role:
        switches = role.does != "both" and not shared and draw(st.booleans())
        size, form = draw(st.integers(3, 12)), draw(st.sampled_from(["pages", "slab"]))
        return dataclasses.replace(
            role,
            lag=lag,
            steps=steps,
            pool=pool(size, form),
            slots=draw(st.integers(1, 3)),
            prefills=draw(st.integers(1, 3)),
            chunk=draw(st.sampled_from([3, 6, 12])),
            growth=growth,
            preempt=how,
            swap_tokens=draw(st.integers(1, 8)) * PAGE if how == "swap" else 0,
            switches=switches,
            mixed=role.mixed or (switches and draw(st.booleans())),
        )

    return {name: vary(role) for name, role in kind.items()}


CACHES = st.one_of(
    st.just(Cache(block=PAGE)),
    st.builds(
        Cache,
        prefix=st.just(True),
        block=st.sampled_from([PAGE, 2 * PAGE]),
        eviction=st.sampled_from(["lru", "fifo"]),
        remote=st.booleans(),
        retention_s=st.sampled_from([0, 30e-9]),
    ),
)
RECOVERIES = st.builds(
    Recovery,
    on_failure=st.sampled_from(["recompute", "fail"]),
    attempts=st.integers(1, 2),
    lease_s=st.sampled_from([0, LEASE_NS * 1e-9]),
)


def _options(unit_s: float) -> dict[str, st.SearchStrategy]:
    """For runs whose steps last some ten units: decisions that fall between steps, and objectives
    that some miss."""
    switching = st.builds(
        Switching,
        policy=st.sampled_from(["never", "slo", "mixed", wild.__name__]),
        every_s=st.sampled_from([3 * unit_s, 9 * unit_s]),
        cooldown_s=st.sampled_from([0, 20 * unit_s]),
        prompts_above=st.sampled_from([0, 6]),
    )
    some = st.sampled_from([2 * unit_s, 9 * unit_s])
    return {
        "switching": switching,
        "slo": st.builds(SLO, ttft_s=some, tpot_s=some),
        "groups": st.integers(1, 3),
        "schedule": st.sampled_from(["whole", "chunkwise", "layerwise", "streaming", "pull"]),
        "credits": st.integers(0, 2),
        "prefill_router": st.sampled_from(["round_robin", "shortest_queue"]),
        "decode_router": st.sampled_from(["round_robin", "shortest_queue"]),
        "cache": CACHES,
    }


OPTIONS_IN_MS = st.fixed_dictionaries(_options(1e-3))
OPTIONS_WITH_RECOVERY = st.fixed_dictionaries(_options(1e-9) | {"recovery": RECOVERIES})
STOPS = st.dictionaries(st.integers(0, 9), st.integers(1, 6))


@st.composite
def arrivals(draw: st.DrawFn) -> dict:
    """What `request` takes: prompt tokens and most output tokens, now and then more than a pool or
    the context holds, or none. Prompts say `first` again and again, or, as a second turn does, go
    on with the tokens that the first one got."""
    first, length = draw(st.sampled_from([7, 8])), draw(st.integers(0, 20))
    turn = draw(st.integers(0, length))
    text = (first,) * turn + tuple(range(length - turn))
    return {"text": text, "max_tokens": draw(st.integers(0, 12))}
