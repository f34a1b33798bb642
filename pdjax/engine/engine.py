"""Builds the instances of a placement and serves them, live or on a modelled clock."""

import functools
from collections.abc import Callable, Iterator, Sequence

import jax

from pdjax.core.config import Clock, Config, Role, pool_owner, role_of
from pdjax.core.events import Action, Arrived, Emitted, Event, Hold, Release, Send, Step
from pdjax.core.scheduler import Scheduler
from pdjax.cost import affine
from pdjax.engine.instance import NOBODY, Instance, Piece, PoolArrays
from pdjax.engine.live import LiveBackend
from pdjax.engine.texts import Texts
from pdjax.programs import kv as kv_pool
from pdjax.programs.attention import order_for
from pdjax.programs.batch import chunk_buckets
from pdjax.programs.mesh import carve, check_tp, tree_sharding
from pdjax.programs.model import logical_axes
from pdjax.programs.step import group_bounds
from pdjax.programs.transfer import check_compatible, move
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
        self.config, self.placement = config, config.placements[placement]
        self.arch = checkpoint.arch
        self.texts = Texts(self.arch.V, decode)
        for name, role in self.placement.items():
            check_tp(self.arch, role.tp, f"placements.{placement}.{name}")
        self._bounds = group_bounds(self.arch.L, config.transfer.groups)
        self._meshes = carve(self.placement, devices)
        self.pools: dict[str, PoolArrays] = {}
        self.instances: dict[str, Instance] = {}
        self._build(checkpoint)

    def _build(self, checkpoint: Checkpoint) -> None:
        dtype, axes = self.config.model.dtype, logical_axes(self.arch)
        params = {
            mesh: checkpoint.place(tree_sharding(mesh, axes), dtype)
            for mesh in dict.fromkeys(self._meshes.values())
        }
        for name, mesh in self._meshes.items():
            owner = pool_owner(name, self.placement)
            if owner not in self.pools:
                layout = self._layout(self.placement[role_of(owner)])
                self.pools[owner] = PoolArrays(layout, mesh, self.config.model.context)
            self.instances[name] = Instance(
                name,
                self.placement[role_of(name)],
                self.arch,
                mesh,
                params[mesh],
                self.pools[owner],
                self._bounds,
                self.texts,
                self.config.model.attention,
            )
        for source, target in self._wires():
            layouts = source.pool.layout, target.pool.layout
            check_compatible(*layouts, (source.name, target.name))

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

    def _wires(self) -> list[tuple[Instance, Instance]]:
        """Who can send KV to whom: whoever prefills into a pool that nobody decodes from."""
        decoders = [i for i in self.instances.values() if i.role.decodes_here]
        sources = [
            i
            for i in self.instances.values()
            if i.role.prefills_here and all(d.pool is not i.pool for d in decoders)
        ]
        return [(source, target) for source in sources for target in decoders]

    # --- to serve ------------------------------------------------------------------------

    def scheduler(self) -> Scheduler:
        """A fresh scheduler for this engine's placement and pools."""
        return Scheduler(
            self.placement,
            context=self.config.model.context,
            transfer=self.config.transfer,
            routing=self.config.routing,
            layouts={name: pool.layout.fingerprint for name, pool in self.pools.items()},
        )

    def backend(self) -> "LiveBackend | VirtualBackend":
        """The backend that the config's clock asks for."""
        clock = self.config.clock
        return self.live() if clock.kind == "wall" else self.modelled(clock)

    def live(self) -> LiveBackend:
        return LiveBackend(self)

    def modelled(self, clock: Clock) -> VirtualBackend:
        """Real tokens, times by an affine model: every action is computed when it starts."""
        return VirtualBackend(
            affine(clock, self.config.transfer.link, self.send_bytes), self._compute, self.note
        )

    def _compute(self, action: Action) -> tuple[Emitted, ...]:
        self.note(action)
        if isinstance(action, Step):
            instance = self.instances[action.instance]
            pieces: list[tuple[Send, Piece]] = []
            step = instance.dispatch(action, lambda send, piece: pieces.append((send, piece)))
            for send, piece in pieces:
                self._deliver(send, piece)
            return instance.collect(step)
        if isinstance(action, Send):
            self._deliver(action, self.instances[action.source].extract(action))
        return ()

    def _deliver(self, send: Send, piece: Piece) -> None:
        target = self.instances[send.target]
        target.insert(send, move(piece, target.mesh))

    def note(self, message: Action | Event) -> None:
        """The bookkeeping that has no arithmetic: who arrived, who holds which pages."""
        if isinstance(message, Arrived):
            self.texts.add(message.request)
        elif isinstance(message, Hold):
            self.pools[message.handle.pool].hold(message.handle)
        elif isinstance(message, Release):
            self.pools[message.pool].release(message.rid)

    def send_bytes(self, send: Send) -> int:
        """K and V of the tokens that a piece carries; padding of its shape does not count."""
        begin, end = self._bounds[send.group]
        layout = self.instances[send.source].pool.layout
        return send.length * (end - begin) * layout.token_bytes

    def warm_ups(self, prompt_lens: Sequence[int]) -> Iterator[Callable[[], object]]:
        """Calls that compile, each one program shape, all that prompts of these lengths need."""
        for instance in self.instances.values():
            yield from instance.warm_ups(prompt_lens)
        whole = self.config.transfer.schedule == "whole"
        for source, target in self._wires():
            chunk = self.config.model.context if whole else source.role.chunk
            for length in chunk_buckets(prompt_lens, chunk, source.role.prefills):
                yield functools.partial(self._warm_send, source, target, length)

    def _warm_send(self, source: Instance, target: Instance, length: int) -> None:
        for group in range(len(self._bounds)):
            send = Send(-1, NOBODY, source.name, target.name, 0, length, group, len(self._bounds))
            piece = move(source.extract(send), target.mesh)
            jax.block_until_ready(target.insert(send, piece))
