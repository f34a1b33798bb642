"""What the parts of the scheduler share: the books, and the single entries that keep them right."""

from collections import deque
from collections.abc import Callable, Mapping

from pdjax.core.config import Cache, Placement, Recovery, Routing, Switching, Transfer
from pdjax.core.events import (
    Action,
    Cancel,
    Cut,
    Hold,
    KVHandle,
    Purpose,
    Release,
    Send,
)
from pdjax.core.leases import Leases
from pdjax.core.link import node_of
from pdjax.core.policies.ordering import ORDERS
from pdjax.core.policies.routing import Load, looks_at_caches
from pdjax.core.policies.switching import Pace
from pdjax.core.policies.transfer import SCHEDULES, Piece
from pdjax.core.prefix import extend
from pdjax.core.side import Side
from pdjax.core.state import Instance, RunningStep, Tracked, build_instances


class Books:
    """All that one scheduler knows. `actions` is what the event at hand has caused so far."""

    def __init__(
        self,
        placement: Placement,
        *,
        context: int,
        transfer: Transfer,
        routing: Routing,
        cache: Cache,
        recovery: Recovery,
        switching: Switching,
        layouts: Mapping[str, str],
        macro_steps: bool,
    ):
        self.context, self.transfer, self.cache = context, transfer, cache
        self.recovery, self.switching = recovery, switching
        # Who decides by how long steps take must see each of them.
        self.macro_steps = macro_steps and switching.policy != "slo"
        self.schedule = SCHEDULES[transfer.schedule]
        self.pulls = transfer.initiator == "pull"
        self.streaming = transfer.schedule == "streaming"
        self.routing = routing
        self.node_of = node_of(placement, transfer.link.nodes) if routing.near else {}
        self.order = ORDERS[routing.order]
        self.changed: dict[str, Instance] = {}  # instances whose load is not ranked yet
        self.instances = build_instances(placement, dict(layouts), cache, self.changed)
        every, remote, load_of = self.instances.values(), cache.remote, self.load_with_cache
        prefills = [i for i in every if i.role.prefills_here]
        decodes = [i for i in every if i.role.decodes_here]
        self.prefill_side = Side(prefills, routing.prefill, routing, remote, load_of)
        self.decode_side = Side(decodes, routing.decode, routing, remote, load_of)
        self.sort_sides()
        self.users = _users_of_pools(self.instances)
        self.requests: dict[int, Tracked] = {}
        self.running: dict[int, RunningStep] = {}
        self.open_steps: dict[str, int] = {}  # instance -> its step that can be cut
        self.flying: dict[int, Send] = {}
        self.unplaced: deque[int] = deque()  # wait for pages of a decode pool, oldest first
        self.homeless: deque[int] = deque()  # wait for a prefill instance to come up
        self.leases = Leases(round(recovery.lease_s * 1e9))
        self.claims: dict[str, int] = {}  # pool -> the oldest that waits for pages of it
        self.awake: dict[str, Instance] = {}  # instances that may have something to start
        self.actions: list[Action] = []
        self.now_ns = 0
        self.alarm_ns: int | None = None  # when leases are looked at
        self.tick_ns: int | None = None  # when `switching` decides
        self.switched_ns = 0  # when an instance last began or ended a change of jobs
        self.paces: dict[str, Pace] = {}  # of instances, since the last tick
        self.waited: frozenset[int] = frozenset()  # in `unplaced` at the last tick
        self.next_step = self.next_send = self.arrived = 0

    def sort_sides(self) -> None:
        """Who takes new work of which kind, by the jobs that instances have now."""
        every = self.instances.values()
        self.prefillers = [i for i in every if i.takes_prompts]
        self.decoders = [i for i in every if i.takes_decodes]
        self.seats = _decoders_on_the_same_pool(self.instances, self.decoders)

    # --- what is to be done --------------------------------------------------------------

    def emit(self, action: Action) -> None:
        self.actions.append(action)

    def wake(self, instance: Instance) -> None:
        self.awake[instance.name] = instance

    def cut(self, instance: Instance) -> None:
        """Its open step, if it has one, ends with the iteration in progress."""
        step = self.open_steps.pop(instance.name, None)
        if step is not None:
            self.emit(Cut(step, instance.name))

    def by_age(self, waiting: deque[int], rid: int) -> None:
        """Puts a request where its age belongs; new ones go last, which is what usually happens."""
        age = self.requests[rid].age
        after = 0
        while after < len(waiting) and self.requests[waiting[-1 - after]].age > age:
            after += 1
        waiting.insert(len(waiting) - after, rid)

    def dequeue(self, t: Tracked) -> None:
        """It waits in its prefill instance's queue no more."""
        t.prefill.queue.remove(t.rid)
        t.prefill.queued_tokens -= t.length

    # --- where to ------------------------------------------------------------------------

    def route_prefill(self, t: Tracked, fits: Callable[[Instance], bool]) -> Instance | None:
        """Who of those that fit shall compute its prompt; nobody, if nobody does."""
        self.reorder()
        return self.prefill_side.choose(t, fits)

    def route_decode(self, t: Tracked, fits: Callable[[Instance], bool]) -> Instance | None:
        """Who of those that fit shall decode it; nobody, if nobody does."""
        self.reorder()
        if self.node_of and t.prefill is not None:
            here = self.node_of[t.prefill.name]
            near = self.decode_side.choose(t, lambda d: self.node_of[d.name] == here and fits(d))
            if near is not None:
                return near
        return self.decode_side.choose(t, fits)

    def reorder(self) -> None:
        """Both sides know the loads as they are now."""
        self.prefill_side.reorder(self.changed.values())
        self.decode_side.reorder(self.changed.values())
        self.changed.clear()

    def load_with_cache(self, t: Tracked, instance: Instance) -> Load:
        pool = instance.pool
        held = (pool.pages - pool.free) * pool.page_size + instance.queued_tokens
        return instance.load._replace(cached=self._cached(t, instance), held=held)

    def expected_hit(self, t: Tracked, instance: Instance) -> int:
        """Tokens that its prefill will find, for all that a router that looks at caches knows."""
        return self._cached(t, instance) if looks_at_caches(self.routing.prefill) else 0

    def _cached(self, t: Tracked, instance: Instance) -> int:
        tokens = instance.pool.cached(t.blocks, self.now_ns) * self.cache.block
        return min(tokens, t.length - 1)

    # --- memory --------------------------------------------------------------------------

    def hold(self, instance: Instance, t: Tracked, tokens: int, blocks: int) -> KVHandle | None:
        """Pages for `tokens` tokens, shared as far as the pool knows the text's first `blocks`; or
        None, and those that come free are kept for it."""
        if self.claimed(instance, t):
            return None
        pool = instance.pool
        handle = pool.hold(t.rid, tokens, blocks=t.blocks[:blocks], now_ns=self.now_ns)
        if handle is None and blocks:  # what is shared may lie amid the only run of a slab
            handle = pool.hold(t.rid, tokens, now_ns=self.now_ns)
        if handle is None:
            self.claim(pool.name, t)
        else:
            self.emit(Hold(handle))
            self.drop_claim(pool.name, t)
        return handle

    def claimed(self, instance: Instance, t: Tracked) -> bool:
        """Whether the pages that come free in its pool are for one who is older than `t`."""
        rid = self.claims.get(instance.pool.name)
        return rid is not None and self.requests[rid].age < t.age

    def claim(self, pool: str, t: Tracked) -> None:
        """The pages that come free are for `t`, unless somebody older waits for them."""
        rid = self.claims.get(pool)
        if rid is None or self.requests[rid].age > t.age:
            self.claims[pool] = t.rid

    def drop_claim(self, pool: str, t: Tracked) -> None:
        if self.claims.get(pool) == t.rid:
            del self.claims[pool]
            for instance in self.users[pool]:  # others may have pages now
                self.wake(instance)

    def release(self, handle: KVHandle) -> None:
        users = self.users[handle.pool]
        users[0].pool.release(handle)
        self.emit(Release(handle.rid, handle.pool))
        for instance in users:
            self.wake(instance)

    def release_target(self, t: Tracked) -> None:
        """What it holds where it decodes, and the slot and the place in the queue there."""
        self.leave_seat(t)
        if t.target is not None and t.target is not t.source:
            self.release(t.target)
        t.target = None
        if t.decode is not None:
            t.decode.add_tokens(output=-t.decode_tokens)
            t.decode_tokens = 0
            if t.decode is not t.prefill:
                t.decode.drop_member(t.rid)
            self.wake(t.decode)

    def leave_seat(self, t: Tracked) -> None:
        if t.slot is not None:
            t.decode.slots[t.slot] = None
            t.decode.free_slots += 1
            t.slot = None
        if t.seated and t.rid in t.decode.ready:
            t.decode.ready.remove(t.rid)
        t.seated = t.joined = False
        self.give_credit_back(t)

    def give_credit_back(self, t: Tracked) -> None:
        if t.credit:
            t.decode.landing -= 1
            t.credit = False

    def publish(self, instance: Instance, handle: KVHandle | None, t: Tracked, tokens: int) -> None:
        """The pool's prefix cache may use the first `tokens` tokens from now on."""
        if self.cache.prefix and handle is not None:
            blocks = t.blocks[: tokens // self.cache.block]
            instance.pool.publish(handle, blocks, self.now_ns)

    def learn(self, t: Tracked, tokens: tuple[int, ...]) -> None:
        """The text goes on with `tokens`."""
        t.generated += len(tokens)
        if self.cache.prefix and (t.blocks or t.tail):
            last = t.blocks[-1] if t.blocks else None
            new, t.tail = extend(last, t.tail, tokens, self.cache.block)
            t.blocks += new

    # --- pieces on their way ----------------------------------------------------------------

    def send(
        self, t: Tracked, piece: Piece, source: str, target: str, purpose: Purpose, groups: int
    ) -> Send:
        """Books a piece; the caller says when it leaves."""
        send = Send(
            self.next_send,
            t.rid,
            source,
            target,
            piece.start,
            piece.length,
            piece.group,
            groups,
            purpose,
        )
        self.next_send += 1
        t.busy += 1
        t.flying[send.id] = self.flying[send.id] = send
        self.leases.grant(t.rid, self.now_ns)
        return send

    def landed(self, send_id: int) -> Tracked | None:
        """Takes a piece that is not on its way any more out of the books; None if it was not."""
        send = self.flying.pop(send_id, None)
        if send is None:
            return None
        t = self.requests[send.rid]
        del t.flying[send_id]
        t.busy -= 1
        self.leases.drop(t.rid)
        if t.flying:
            self.leases.grant(t.rid, self.now_ns)
        return t

    def cancel_flying(self, t: Tracked) -> None:
        for send_id in t.flying:
            self.emit(Cancel(t.rid, send_id))


def _decoders_on_the_same_pool(
    instances: Mapping[str, Instance], decoders: list[Instance]
) -> dict[str, Instance]:
    """Instance -> the one that decodes from the same pool, where there is one."""
    of_pool = {d.pool.name: d for d in decoders}
    return {i.name: of_pool[i.pool.name] for i in instances.values() if i.pool.name in of_pool}


def _users_of_pools(instances: Mapping[str, Instance]) -> dict[str, list[Instance]]:
    users: dict[str, list[Instance]] = {}
    for instance in instances.values():
        users.setdefault(instance.pool.name, []).append(instance)
    return users
