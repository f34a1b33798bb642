"""What every log must keep, whatever was decided. The referee reads events and actions only; it
shares no code with the scheduler and knows nothing of its policies."""

from collections import Counter, defaultdict

from pdjax.core.config import Placement
from pdjax.core.events import (
    AbortAsked,
    Action,
    Arrived,
    Chunk,
    Decode,
    Event,
    Finish,
    Hold,
    KVHandle,
    Landed,
    Refuse,
    Release,
    Send,
    Step,
    StepDone,
)
from pdjax.core.request import Request


class Referee:
    """Follows one run; an AssertionError names the law that was broken."""

    def __init__(self, placement: Placement):
        self._placement = placement
        self._free: dict[str, set[int]] = {}
        for name, role in placement.items():
            for i in range(role.instances):
                if not role.pool_of:
                    self._free[f"{name}/{i}"] = set(range(role.pool.pages))
        self._full = {pool: len(pages) for pool, pages in self._free.items()}
        self._releases: Counter[tuple[str, int]] = Counter()  # of each page
        self._held: dict[tuple[int, str], KVHandle] = {}
        self._requests: dict[int, Request] = {}
        self._aborted: set[int] = set()
        self._stopped: set[int] = set()
        self._ended: dict[int, Finish | Refuse] = {}
        self._running: dict[int, Step] = {}
        self._flying: dict[int, Send] = {}
        self._dispatched: Counter[int] = Counter()  # prompt tokens by request
        self._computed: Counter[int] = Counter()
        self._home: dict[int, str] = {}  # the pool where a prompt was computed
        self._asked: Counter[int] = Counter()  # output tokens by request
        self._seen: Counter[int] = Counter()
        self._sent: set[tuple[int, int, int]] = set()  # (request, token, layer group)
        self._landed: defaultdict[tuple[int, str], Counter[int]] = defaultdict(Counter)
        self._seats: dict[tuple[str, int], int] = {}
        self._groups = 0  # layer groups, as sends tell

    def observe(self, body: Event | Action) -> None:
        match body:
            case Arrived():
                assert body.request.id not in self._requests, "ids are unique"
                self._requests[body.request.id] = body.request
            case AbortAsked():
                self._aborted.add(body.rid)
            case StepDone():
                self._step_done(body)
            case Landed():
                self._land(self._flying.pop(body.send))
            case Hold():
                self._hold(body.handle)
            case Release():
                self._release(body)
            case Send():
                assert body.start + body.length <= self._computed[body.rid], "sent before computed"
                self._send(body)
            case Step():
                self._step(body)
            case Finish():
                self._finish(body)
            case Refuse():
                self._end(body)

    def end(self) -> None:
        assert not self._running and not self._flying, "nothing goes on after the end"
        assert not self._held, "what was held is released"
        assert {pool: len(pages) for pool, pages in self._free.items()} == self._full
        assert self._ended.keys() == self._requests.keys(), "every request ends"

    # --- memory --------------------------------------------------------------------------

    def _hold(self, handle: KVHandle) -> None:
        role = self._placement[handle.pool.split("/")[0]]
        pages = handle.pages
        assert set(pages) <= self._free[handle.pool], "a page has one owner"
        assert handle.rid not in self._ended
        assert (handle.rid, handle.pool) not in self._held
        assert handle.generations == tuple(self._releases[handle.pool, page] for page in pages)
        assert handle.capacity == len(pages) * role.pool.page_size
        if role.pool.form == "slab":
            assert pages == tuple(range(pages[0], pages[0] + len(pages))), "a slab is contiguous"
        self._free[handle.pool] -= set(pages)
        self._held[handle.rid, handle.pool] = handle

    def _release(self, release: Release) -> None:
        handle = self._held.pop((release.rid, release.pool))
        for step in self._running.values():
            names = {work.rid for work in (*step.chunks, *step.decodes)}
            uses = release.rid in names and self._pool(step.instance) == release.pool
            assert not uses, "released while a step uses it"
        for send in self._flying.values():
            ends = self._pool(send.source), self._pool(send.target)
            assert send.rid != release.rid or release.pool not in ends, (
                "released while a piece flies"
            )
        for page in handle.pages:
            self._releases[release.pool, page] += 1
        self._free[release.pool] |= set(handle.pages)

    def _pool(self, instance: str) -> str:
        role, i = instance.split("/")
        return f"{self._placement[role].pool_of or role}/{i}"

    def _capacity(self, rid: int, instance: str) -> int:
        return self._held[rid, self._pool(instance)].capacity

    # --- steps and sends -------------------------------------------------------------------

    def _step(self, step: Step) -> None:
        role = self._placement[step.instance.split("/")[0]]
        beside = [s for s in self._running.values() if s.instance == step.instance]
        assert len(beside) <= role.lag, "more steps at once than the lag allows"
        assert step.chunks or step.decodes
        assert role.mixed or not (step.chunks and step.decodes), "only a mixed step has both"
        assert sum(chunk.length for chunk in step.chunks) <= role.chunk
        assert step.steps == max((work.count for work in step.decodes), default=1) <= role.steps
        assert step.steps == 1 or not step.chunks
        for chunk in step.chunks:
            self._chunk(chunk, step)
        for work in step.decodes:
            assert 0 <= work.slot < role.slots
            self._decode(work, step)
        for send in step.sends:
            assert (send.start, send.length) in {
                (c.start, c.length) for c in step.chunks if c.rid == send.rid
            }, "what leaves from inside a step is what the step computes"
            self._send(send)
        self._running[step.id] = step

    def _chunk(self, chunk: Chunk, step: Step) -> None:
        rid, end = chunk.rid, chunk.start + chunk.length
        page = self._placement[self._pool(step.instance).split("/")[0]].pool.page_size
        assert rid not in self._ended, "an ended request gets no work"
        assert chunk.length > 0 and chunk.start == self._dispatched[rid]
        assert chunk.last == (end == self._requests[rid].prompt_len)
        assert chunk.last or end % page == 0, "the next chunk starts on a page of its own"
        assert end <= self._capacity(rid, step.instance)
        self._dispatched[rid] = end
        self._home[rid] = self._pool(step.instance)
        self._asked[rid] += chunk.last

    def _decode(self, work: Decode, step: Step) -> None:
        rid, request = work.rid, self._requests[work.rid]
        assert rid not in self._ended, "an ended request gets no work"
        assert self._computed[rid] == request.prompt_len
        pool = self._pool(step.instance)
        if pool != self._home[rid]:
            counts = self._landed[rid, pool]
            assert counts == dict.fromkeys(range(request.prompt_len), self._groups)
        assert work.position == request.prompt_len + self._asked[rid] - 1
        assert 0 < work.count <= request.max_tokens - self._asked[rid], "more tokens than asked for"
        assert work.position + work.count <= self._capacity(rid, step.instance)
        before = self._seats.setdefault((step.instance, work.slot), rid)
        if before != rid:
            assert before in self._ended, "a slot has one request"
            steps = self._running.values()
            assert all(before != d.rid for s in steps for d in s.decodes), "its last step goes on"
            self._seats[step.instance, work.slot] = rid
        self._asked[rid] += work.count

    def _send(self, send: Send) -> None:
        assert send.rid not in self._ended
        assert 0 <= send.group < send.groups
        assert self._pool(send.source) == self._home[send.rid] != self._pool(send.target)
        assert send.start + send.length <= self._capacity(send.rid, send.target)
        pieces = {(send.rid, send.start + i, send.group) for i in range(send.length)}
        assert not pieces & self._sent, "everything is sent once"
        self._sent |= pieces
        self._flying[send.id] = send
        self._groups = send.groups

    def _land(self, send: Send) -> None:
        counts = self._landed[send.rid, self._pool(send.target)]
        counts.update(range(send.start, send.start + send.length))

    def _step_done(self, done: StepDone) -> None:
        step = self._running.pop(done.step)
        for chunk in step.chunks:
            self._computed[chunk.rid] += chunk.length
        for emitted in done.emitted:
            if emitted.rid not in self._ended:
                self._seen[emitted.rid] += len(emitted.tokens)
                self._stopped |= {emitted.rid} if emitted.stopped else set()

    # --- ends ------------------------------------------------------------------------------

    def _finish(self, finish: Finish) -> None:
        rid = finish.rid
        assert finish.tokens == self._seen[rid] <= self._requests[rid].max_tokens
        match finish.reason:
            case "abort":
                assert rid in self._aborted
            case "stop":
                assert rid in self._stopped
            case "length":
                assert finish.tokens == self._requests[rid].max_tokens
                assert rid not in self._stopped
        self._end(finish)

    def _end(self, end: Finish | Refuse) -> None:
        assert end.rid in self._requests
        assert end.rid not in self._ended, "a request ends once"
        self._ended[end.rid] = end
