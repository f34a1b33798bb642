"""Pieces of a live run on their way, with wires that only say what they were asked for. A gate
holds a piece where a test wants to cancel it; what has been done when a piece fails is final."""

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

import pytest

from pdjax.core.config import Link, Nodes, Placement, Role
from pdjax.core.events import Landed, Send, SendFailed, Step
from pdjax.engine.flights import Flights
from pdjax.engine.threads import Threads
from pdjax.links import Network
from pdjax.programs.transfer import Landing

PATIENCE = 30  # seconds after which something is taken to hang; nothing here takes long


class Wires:
    """Carries nothing. `done`: what was done for which piece, in order; a closed gate (stage, id)
    stops whoever comes through until it is opened."""

    def __init__(self):
        self.done: list[tuple[str, int]] = []
        self.gates: dict[tuple[str, int], threading.Event] = {}
        self.reached: defaultdict[tuple[str, int], threading.Event] = defaultdict(threading.Event)
        self.damaged: set[int] = set()

    def close(self, stage: str, id: int) -> None:
        self.gates[stage, id] = threading.Event()

    def open(self, stage: str, id: int) -> None:
        self.gates[stage, id].set()

    def wait(self, stage: str, id: int) -> None:
        assert self.reached[stage, id].wait(PATIENCE), f"piece {id} never came to {stage}"

    def _pass(self, stage: str, send: Send) -> str:
        self.reached[stage, send.id].set()
        if (stage, send.id) in self.gates:
            assert self.gates[stage, send.id].wait(PATIENCE)
        self.done.append((stage, send.id))
        return f"piece {send.id}"

    def extract(self, send: Send) -> str:
        return self._pass("extract", send)

    def move(self, send: Send, piece: str) -> str:
        assert piece == f"piece {send.id}"
        return self._pass("move", send)

    def insert(self, send: Send, piece: str) -> Landing:
        assert piece == f"piece {send.id}"
        self._pass("insert", send)
        return Landing(None)

    def damage(self, send: int) -> str:
        return "damaged" if send in self.damaged else ""

    def nbytes(self, send: Send) -> int:
        return send.length


class Run:
    """Flights of one test, and what is heard of them."""

    def __init__(self, link: Link, placement: Placement | None = None):
        self.wires, self.heard = Wires(), queue.SimpleQueue()
        self.threads = Threads(self.heard.put)
        network = Network(link, placement)
        self.flights = Flights(self.wires, network, self.threads, time.monotonic_ns, self.heard.put)

    def start(self, send: Send) -> None:
        self.flights.add(send)
        self.threads.do(send.source, lambda: self.flights.leave(send))

    def next(self) -> Landed | SendFailed:
        event = self.heard.get(timeout=PATIENCE)
        assert isinstance(event, Landed | SendFailed), event
        return event

    def nothing_more(self) -> None:
        """Every thread does what it has been given, and nothing is heard of it."""
        for name in ("p", "p -> d", "d", "d collector"):
            passed = threading.Event()
            self.threads.do(name, passed.set)
            assert passed.wait(PATIENCE)
        assert self.heard.empty()


@pytest.fixture
def run() -> Iterator[Run]:
    run = Run(Link())
    yield run
    run.flights.close()
    run.threads.stop()


@pytest.fixture
def slow() -> Iterator[Run]:
    """A byte a microsecond."""
    run = Run(Link(bytes_per_s=1e6))
    yield run
    run.flights.close()
    run.threads.stop()


def send(id: int, length: int = 8, *, source: str = "p", target: str = "d", group: int = 0) -> Send:
    return Send(id, 7, source, target, 0, length, group, 2)


def test_a_piece_is_taken_out_moved_and_put_in(run):
    run.start(send(3))
    landed = run.next()
    assert landed == Landed(7, 3, landed.began_ns, 8)
    assert run.wires.done == [("extract", 3), ("move", 3), ("insert", 3)]
    run.nothing_more()


def test_what_is_damaged_fails_with_the_reason(run):
    run.wires.damaged.add(3)
    run.start(send(3))
    assert run.next() == SendFailed(7, 3, "damaged")


# --- Cancelling ------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["extract", "move", "insert"])
def test_a_piece_can_be_cancelled_anywhere_and_nothing_is_done_after_it_has_failed(run, stage):
    run.wires.close(stage, 0)
    run.start(send(0))
    run.wires.wait(stage, 0)
    run.flights.cancel(0)
    if stage == "move":  # which touches no pages
        assert run.next() == SendFailed(7, 0, "cancelled")
        run.wires.open(stage, 0)
    else:  # a thread is at the pages: it has to be through
        assert run.heard.empty()
        run.wires.open(stage, 0)
        assert run.next() == SendFailed(7, 0, "cancelled")
    run.nothing_more()
    assert run.wires.done[-1] == (stage, 0)


def test_a_piece_that_was_cancelled_before_it_left_is_not_taken_out(run):
    run.flights.add(send(0))
    run.flights.cancel(0)
    assert run.next() == SendFailed(7, 0, "cancelled")
    run.flights.leave(send(0))
    run.nothing_more()
    assert not run.wires.done


def test_a_piece_that_waits_for_its_target_is_not_put_in_once_cancelled(run):
    busy = threading.Event()
    run.threads.do("d", lambda: busy.wait(PATIENCE))
    run.start(send(0))
    run.wires.wait("move", 0)
    run.flights.cancel(0)
    assert run.next() == SendFailed(7, 0, "cancelled")
    busy.set()
    run.nothing_more()
    assert ("insert", 0) not in run.wires.done


def test_cancelling_what_has_ended_changes_nothing(run):
    for id in range(2):
        run.start(send(id))
        run.next()
        run.flights.cancel(id)
    run.flights.cancel(99)
    run.nothing_more()


def test_pieces_cancelled_at_random_moments_each_end_once(run):
    for id in range(300):
        run.start(send(id))
        if id % 3:
            run.flights.cancel(id - id % 7)
    ends = [run.next() for _ in range(300)]
    assert sorted(end.send for end in ends) == list(range(300))
    run.nothing_more()
    put = {id for stage, id in run.wires.done if stage == "insert"}
    assert {end.send for end in ends if isinstance(end, Landed)} <= put


# --- Emulated links ----------------------------------------------------------------------------


def test_a_piece_takes_at_least_as_long_as_its_link(slow):
    began = time.monotonic_ns()
    for id in range(3):
        slow.start(send(id, 5000))
    ends = [slow.next() for _ in range(3)]
    assert [end.send for end in ends] == [0, 1, 2]
    assert time.monotonic_ns() - began >= 15_000_000
    # One after the other: each begins when the bytes of the one before are over.
    starts = [end.began_ns for end in ends]
    assert all(later - earlier >= 5_000_000 for earlier, later in pairwise(starts))


def test_pieces_from_two_instances_share_the_way_into_a_third(slow):
    began = time.monotonic_ns()
    slow.start(send(0, 8000))
    slow.start(send(1, 8000, source="q"))
    for _ in range(2):
        slow.next()
    assert time.monotonic_ns() - began >= 16_000_000


def test_a_piece_on_a_slow_link_can_be_cancelled_at_once(slow):
    slow.start(send(0, 1_000_000_000))  # a thousand seconds
    slow.wires.wait("move", 0)
    slow.flights.cancel(0)
    assert slow.next() == SendFailed(7, 0, "cancelled")
    slow.start(send(1))
    assert isinstance(slow.next(), Landed)


def test_a_stall_holds_pieces_back_even_without_a_link(run):
    run.flights.stall("d", 0.02)
    began = time.monotonic_ns()
    run.start(send(0))
    assert isinstance(run.next(), Landed)
    assert time.monotonic_ns() - began >= 15_000_000  # the stall began a little before


def test_a_stall_without_an_end_is_ended_by_cancelling(run):
    run.flights.stall("d", 0)
    run.start(send(0))
    run.start(send(1, target="e"))
    assert run.next().send == 1
    run.flights.cancel(0)
    assert run.next() == SendFailed(7, 0, "cancelled")


# --- Steps that await pieces -------------------------------------------------------------------


def joining(run: Run, step: Step, group: int) -> threading.Event:
    """Joins in the target's thread; set when that is over."""
    over = threading.Event()

    def join() -> None:
        run.flights.join(step, group)
        over.set()

    run.threads.do("d", join)
    return over


def test_a_step_puts_in_the_pieces_that_it_awaits_itself(run):
    """They come while the thread that would put them in is inside the step."""
    run.wires.close("move", 0)
    run.start(send(0))
    over = joining(run, Step(0, "d", awaits=(0,)), 0)
    run.wires.wait("move", 0)
    assert not over.is_set()
    run.wires.open("move", 0)
    assert over.wait(PATIENCE)
    assert run.next().send == 0
    run.nothing_more()
    assert run.wires.done == [("extract", 0), ("move", 0), ("insert", 0)]


def test_a_step_does_not_wait_for_pieces_of_other_groups(run):
    for id in range(2):
        run.wires.close("move", id)
        run.start(send(id, group=id))
    step = Step(0, "d", awaits=(0, 1))
    first, second = joining(run, step, 0), joining(run, step, 1)
    run.wires.open("move", 0)
    assert first.wait(PATIENCE) and not second.is_set()
    run.wires.open("move", 1)
    assert second.wait(PATIENCE)


def test_a_step_does_not_wait_for_pieces_that_have_landed_or_never_were(run):
    run.start(send(0))
    run.next()
    assert joining(run, Step(0, "d", awaits=(0, 55)), 0).wait(PATIENCE)


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_a_step_stops_waiting_when_nothing_will_come(run, how):
    run.flights.stall("d", 0)
    run.start(send(0))
    over = joining(run, Step(0, "d", awaits=(0,)), 0)
    run.wires.wait("move", 0)
    assert not over.is_set()
    run.flights.cancel(0) if how == "cancel" else run.flights.close()
    assert over.wait(PATIENCE)
    assert ("insert", 0) not in run.wires.done


# --- nodes ---------------------------------------------------------------------------------


def test_on_the_wall_clock_a_piece_within_a_node_overtakes_one_between_nodes():
    """Two pieces of 100 bytes share a NIC of 1 byte a millisecond; the fabric takes no time."""
    placement = {"p": Role("prefill", instances=2), "d": Role("decode", instances=2)}
    link = Link(bytes_per_s=1e3, nodes=Nodes(2, fill="interleaved"))
    run = Run(link, placement)
    try:
        began_ns = time.monotonic_ns()
        run.start(send(0, 100, source="p/0", target="d/1"))
        run.start(send(1, 100, source="d/0", target="p/1"))
        run.start(send(2, 100, source="p/0", target="d/0"))
        assert [run.next().send for _ in range(3)].index(2) == 0
        assert time.monotonic_ns() - began_ns >= 200e6
    finally:
        run.flights.close()
        run.threads.stop()
