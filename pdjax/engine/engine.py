"""Builds the instances of a placement and serves them, live or on a modelled clock."""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence

import jax

from pdjax.core.config import Clock, Config, Role, pool_owner, role_of
from pdjax.core.events import (
    Action,
    Arrived,
    Cancel,
    Emitted,
    Event,
    Finish,
    Grow,
    Hold,
    Release,
    Send,
    Step,
)
from pdjax.core.scheduler import Scheduler
from pdjax.cost import affine
from pdjax.engine.instance import Instance
from pdjax.engine.live import LiveBackend
from pdjax.engine.pools import NOBODY, HostPool, PoolArrays
from pdjax.engine.texts import Texts
from pdjax.engine.wires import Wires
from pdjax.faults import Breakable, with_faults
from pdjax.programs import kv as kv_pool
from pdjax.programs.attention import order_for
from pdjax.programs.batch import chunk_buckets
from pdjax.programs.mesh import carve, check_tp
from pdjax.programs.step import group_bounds
from pdjax.programs.transfer import Piece, check_compatible
from pdjax.programs.transports import TRANSPORTS, check_transport
from pdjax.programs.weights import Checkpoint
from pdjax.virtual import VirtualBackend


class Engine:
    """The instances of one placement of `config`, with weights and pools on their meshes.

    decode: token ids -> text, for requests with stop strings. Raises ConfigError or ModelError
    with one line when the placement does not fit the model or the devices.
    """

    def __init__(
        self,
        config: Config,
        placement: str,
        checkpoint: Checkpoint,
        *,
        decode: Callable[[Sequence[int]], str] | None = None,
        devices: Sequence[jax.Device] | None = None,
    ):
        self.config, self._name = config, placement
        self.placement = config.placements[placement]
        self.arch = checkpoint.arch
        self.texts = Texts(self.arch.V, decode)
        for name, role in self.placement.items():
            check_tp(self.arch, role.tp, f"placements.{placement}.{name}")
        self._bounds = group_bounds(self.arch.L, config.transfer.groups)
        self._meshes = carve(self.placement, devices)
        self.pools = self._make_pools()
        self.instances = self._make_instances(checkpoint)
        self.hosts = self._make_hosts()
        for source, target in self._hand_offs() + self._loads():
            names, one, other = (source.name, target.name), source.pool, target.pool
            check_compatible(one.layout, other.layout, names)
            check_transport(config.transfer.transport, one.mesh, other.mesh, names)
        ends = {name: instance.pool for name, instance in self.instances.items()}
        self.wires = Wires(ends | self.hosts, TRANSPORTS[config.transfer.transport])

    def _make_pools(self) -> dict[str, PoolArrays]:
        transfer, pools = self.config.transfer, {}
        locks = {mesh: threading.RLock() for mesh in self._meshes.values()}
        for name, mesh in self._meshes.items():
            owner = pool_owner(name, self.placement)
            if owner not in pools:
                pools[owner] = PoolArrays(
                    self._layout(self.placement[role_of(owner)]),
                    mesh,
                    self.config.model.context,
                    checksum=transfer.checksum,
                    lock=locks[mesh] if transfer.transport == "collective" else None,
                    implementation=self.config.model.attention,
                )
        return pools

    def _make_instances(self, checkpoint: Checkpoint) -> dict[str, Instance]:
        model = self.config.model
        meshes = dict.fromkeys(self._meshes.values())
        params = {mesh: checkpoint.place_on(mesh, model.dtype) for mesh in meshes}
        return {
            name: Instance(
                name,
                self.placement[role_of(name)],
                self.arch,
                mesh,
                params[mesh],
                self.pools[pool_owner(name, self.placement)],
                self._bounds,
                self.texts,
                model.attention,
            )
            for name, mesh in self._meshes.items()
        }

    def _make_hosts(self) -> dict[str, HostPool]:
        """Swap space, of the instances that have any."""
        return {
            f"{name}.host": HostPool(instance.pool.layout, self.config.transfer.checksum)
            for name, instance in self.instances.items()
            if instance.role.swap_tokens
        }

    def _layout(self, role: Role) -> kv_pool.Layout:
        arch, pool = self.arch, role.pool
        return kv_pool.Layout(
            arch.name,
            arch.L,
            arch.K,
            arch.H,
            self.config.model.dtype,
            pool.page_size,
            pool.pages,
            role.tp,
            order_for(self.config.model.attention),
        )

    def _hand_offs(self) -> list[tuple[Instance, Instance]]:
        """Whoever prefills into a pool that nobody decodes from sends to all who decode; and so do
        those who may prefill or decode, to each other."""
        decoders = [i for i in self.instances.values() if i.role.decodes_here]
        sources = [
            i
            for i in self.instances.values()
            if i.role.prefills_here
            and (i.role.switches or all(d.pool is not i.pool for d in decoders))
        ]
        return [(s, target) for s in sources for target in decoders if s.pool is not target.pool]

    def _loads(self) -> list[tuple[Instance, Instance]]:
        """With a prefix cache that loads, all who have KV send to those who prefill."""
        if not (self.config.cache.prefix and self.config.cache.remote):
            return []
        every = self.instances.values()
        return [
            (i, p) for i in every for p in every if p.role.prefills_here and i.pool is not p.pool
        ]

    # --- to serve ------------------------------------------------------------------------

    def scheduler(self) -> Scheduler:
        """A fresh scheduler for this engine's placement and pools."""
        layouts = {name: pool.layout.fingerprint for name, pool in self.pools.items()}
        return Scheduler.of(self.config, self._name, layouts=layouts)

    def backend(self) -> Breakable:
        """The backend that the config's clock asks for, with the config's faults."""
        clock = self.config.clock
        backend = self.live() if clock.kind == "wall" else self.modelled(clock)
        return with_faults(backend, self.config.faults, self.placement)

    def live(self) -> LiveBackend:
        return LiveBackend(self)

    def modelled(self, clock: Clock) -> VirtualBackend:
        """Real tokens, times by an affine model: every action is computed when it starts."""
        cost = affine(clock, self.config.transfer.link, self.send_bytes)
        return VirtualBackend(
            cost, self._compute, self.note, contents=self.wires, placement=self.placement
        )

    def _compute(self, action: Action) -> tuple[Emitted, ...]:
        self.note(action)
        if isinstance(action, Step):
            instance = self.instances[action.instance]
            pieces: list[tuple[Send, Piece]] = []
            step = instance.dispatch(
                action, lambda send: pieces.append((send, self.wires.extract(send)))
            )
            for send, piece in pieces:
                self.wires.deliver(send, piece)
            return instance.collect(step)
        if isinstance(action, Send):
            self.wires.deliver(action, self.wires.extract(action))
        return ()

    def note(self, message: Action | Event) -> None:
        """The bookkeeping that has no arithmetic: who arrived, who holds which pages."""
        if isinstance(message, Arrived):
            self.texts.add(message.request)
        elif isinstance(message, Hold):
            self._memory(message.handle.pool).hold(message.handle)
        elif isinstance(message, Grow):
            self.pools[message.handle.pool].grow(message.handle)
        elif isinstance(message, Release):
            self._memory(message.pool).release(message.rid)
        elif isinstance(message, Cancel):
            self.wires.forget(message.send)
        elif isinstance(message, Finish):
            self.texts.finish(message.rid, message.tokens)

    def _memory(self, name: str) -> PoolArrays | HostPool:
        return self.hosts[name] if name in self.hosts else self.pools[name]

    def send_bytes(self, send: Send) -> int:
        """K and V of the tokens that a piece carries; padding of its shape does not count."""
        return self.wires.nbytes(send)

    # --- warm-up -------------------------------------------------------------------------

    def warm_ups(self, prompt_lens: Sequence[int]) -> Iterator[Callable[[], object]]:
        """Calls that compile, each one program shape, all that prompts of these lengths need."""
        lengths = self._text_lengths(prompt_lens)
        for instance in self.instances.values():
            yield from instance.warm_ups(lengths)
        groups, context = self.config.transfer.groups, self.config.model.context
        whole = self.config.transfer.schedule == "whole"
        for source, target in self._hand_offs():
            role = source.role
            sizes = chunk_buckets(lengths, context if whole else role.chunk, role.prefills)
            yield from self._warm_wire(source.name, target.name, sizes, groups)
        prefixes = chunk_buckets(range(1, max(lengths, default=1) + 1), context, 1)
        for source, target in self._loads():
            yield from self._warm_wire(source.name, target.name, prefixes, groups)
        stored = chunk_buckets(range(min(lengths, default=1), context + 1), context, 1)
        for host in self.hosts:
            yield from self._warm_wire(host.removesuffix(".host"), host, stored, 1)
            yield from self._warm_wire(host, host.removesuffix(".host"), stored, 1)

    def _text_lengths(self, prompt_lens: Sequence[int]) -> Sequence[int]:
        """Lengths of text that prefill can be asked for: more than the prompts' where KV may have
        to be computed again, less where a cache has a part."""
        config, roles = self.config, self.placement.values()
        again = config.faults or config.recovery.lease_s
        again = again or any(role.growth or role.switches for role in roles)
        if not prompt_lens or not (again or config.cache.prefix):
            return prompt_lens
        shortest = 1 if config.cache.prefix else min(prompt_lens)
        return range(shortest, (config.model.context if again else max(prompt_lens)) + 1)

    def _warm_wire(
        self, source: str, target: str, sizes: Sequence[int], groups: int
    ) -> Iterator[Callable[[], object]]:
        def warm(size: int) -> None:
            for group in range(groups):
                send = Send(-1, NOBODY, source, target, 0, size, group, groups)
                jax.block_until_ready(self.wires.deliver(send, self.wires.extract(send)))

        return (functools.partial(warm, size) for size in sizes)
