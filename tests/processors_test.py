"""Steps on one processor slow each other down, as the fluid model says, and no others."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdjax.core.config import Clock, Config, Link, Model, Pool, Role
from pdjax.core.events import AbortAsked, Send, Step, StepDone
from pdjax.core.placement import Placement
from pdjax.core.request import Request, SamplingParams
from pdjax.cost import Cost, affine
from pdjax.metrics import analyse
from pdjax.processors import Sharing
from pdjax.sim import simulate
from pdjax.virtual import VirtualBackend
from pdjax.workload import Source

MS = 1_000_000
TWO_POOLS = {"prefill": Role("prefill"), "decode": Role("decode", beside="prefill")}
NO_LINK = Link()
APART = {"prefill": Role("prefill"), "decode": Role("decode")}


class Backend:
    """Steps of given lengths at given times (ms); when each has ended."""

    def __init__(self, placement: Placement, sharing: Sharing | None = None, link: Link = NO_LINK):
        self.lengths: list[int] = []
        self.later: deque[tuple[str, float]] = deque()
        cost = Cost(
            lambda step: self.lengths[step.id],
            lambda send: send.length,
            link,
            sharing=sharing or Sharing(),
        )
        self.it = VirtualBackend(cost, lambda a: (), lambda e: None, placement=placement)

    def start(self, instance: str, length_ms: float, **options) -> None:
        step = Step(len(self.lengths), instance, (), (), 1, **options)
        self.lengths.append(round(length_ms * MS))
        self.it.start(step)

    def start_later(self, at_ms: float, instance: str, length_ms: float) -> None:
        """The abort of nobody says when."""
        self.it.submit(AbortAsked(-1), round(at_ms * MS))
        self.later.append((instance, length_ms))

    def ends(self) -> dict[int, float]:
        ends: dict[int, float] = {}
        while self.later or len(ends) < len(self.lengths):
            t_ns, event = self.it.next_event()
            if isinstance(event, StepDone):
                ends[event.step] = t_ns / MS
            elif isinstance(event, AbortAsked):
                self.start(*self.later.popleft())
        return ends


def test_two_steps_on_one_device_share_it_evenly():
    it = Backend(TWO_POOLS)
    it.start("prefill/0", 100)
    it.start_later(50, "decode/0", 100)  # the first has 50 to go: they take 100 together
    assert it.ends() == {0: 150, 1: 200}


def test_steps_on_devices_of_their_own_do_not():
    it = Backend(APART)
    it.start("prefill/0", 100)
    it.start("decode/0", 100)
    assert it.ends() == {0: 100, 1: 100}


def test_on_one_host_all_instances_share():
    it = Backend(APART, Sharing(speed=0.8, host=True))
    it.start("prefill/0", 80)
    it.start("decode/0", 40)  # 50 at 0.8; by then the first has 40 to go, alone
    assert it.ends() == {1: 50, 0: 90}


def test_a_speed_of_one_is_no_sharing():
    it = Backend(TWO_POOLS, Sharing(speed=1.0))
    it.start("prefill/0", 100)
    it.start("decode/0", 30)
    assert it.ends() == {0: 100, 1: 30}


@pytest.mark.parametrize(("speed", "together", "of_each"), [(0.5, 4, 0.25), (0.6, 3, 3 / 7)])
def test_each_further_step_adds_as_much_as_the_second_did(speed, together, of_each):
    assert Sharing(speed).of(together) == pytest.approx(of_each)


def test_a_step_that_waits_for_a_piece_leaves_the_processor_to_others():
    it = Backend(TWO_POOLS, link=Link(bytes_per_s=1e6))
    piece = Send(7, 0, "elsewhere", "decode/0", 0, 60_000, 1, 2)  # 60 ms
    it.it.start(piece)
    it.start("decode/0", 40, awaits=(7,))  # its second half waits for the piece
    it.start("prefill/0", 50)
    # Together until 40, when the first half (20) is over; then 30 more, alone until 60 and after.
    # At 60 the prefill has 10 to go and the decode 20, so they end at 80 and 90.
    assert it.ends() == {1: 80, 0: 90}


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 100)), min_size=1, max_size=8))
def test_an_evenly_shared_processor_does_all_work_and_is_never_idle(jobs):
    """The last one ends when it would if they were served one after the other."""
    it = Backend({f"r{i}": Role("both", beside="r0" if i else "") for i in range(len(jobs))})
    free = 0
    for i, (at, length) in enumerate(sorted(jobs)):
        it.start_later(at, f"r{i}/0", length)
        free = max(free, at) + length
    assert max(it.ends().values()) == pytest.approx(free, abs=1e-4)


# --- In a simulation ------------------------------------------------------------------------


def run_of(placement: Placement):
    """Two prompts, the second while the first decodes: 100 ms each and 10 ms a token."""
    clock = Clock(
        "modelled", step_s=0, prefill_token_s=1e-3, decode_token_s=1e-2, context_token_s=0
    )
    config = Config({"it": placement}, model=Model("", context=1024))
    requests = Source(tuple(Request(i, i * 200 * MS, 100, SamplingParams(41)) for i in range(2)))
    cost = affine(clock, config.transfer.link, lambda send: 0)
    return analyse(list(simulate(config, "it", requests, cost)), placement, config.slo).requests


def test_two_pools_on_one_device_are_no_second_device():
    """The first decodes 10 ms a token until the second decodes too, then 20 ms: 200 + 20 * 20 ms.
    On one device the second prompt takes 100 ms longer, and 10 tokens beside it do."""
    pool = Pool(tokens=1024)
    decode = Role("decode", pool=pool)
    apart = run_of({"prefill": Role("prefill", pool=pool), "decode": decode})
    shared = run_of(
        {
            "prefill": Role("prefill", pool=pool),
            "decode": Role("decode", pool=pool, beside="prefill"),
        }
    )
    assert apart.ttft_s.tolist() == pytest.approx([0.1, 0.1])
    assert shared.ttft_s.tolist() == pytest.approx([0.1, 0.2])
    assert apart.decode_s[0] == pytest.approx(0.6)
    assert shared.e2e_s[0] == pytest.approx(apart.e2e_s[0] + 0.1, abs=0.011)  # a step
