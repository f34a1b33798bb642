"""The simulator: the server's own loop, policies and accounting in virtual time, without arrays."""

import functools
from collections.abc import Iterator

from pdjax.core.config import Config
from pdjax.core.events import Action, Emitted, Record, Step
from pdjax.core.loop import Source, serve
from pdjax.core.scheduler import Scheduler
from pdjax.cost import Cost
from pdjax.faults import with_faults
from pdjax.processors import shared_processors
from pdjax.virtual import Unseen, VirtualBackend


def simulate(
    config: Config, placement: str, source: Source, cost: Cost, *, macro_steps: bool = True
) -> Iterator[Record]:
    """The log of serving the requests of `source` under one placement, if steps and pieces last
    as `cost` says. Every request gets as many tokens as it asks for.

    macro_steps: decode steps that are alike are one event, which changes no token's time.
    """
    roles = config.placements[placement]
    # Iterations that another instance can stretch are steps of their own.
    alone = not shared_processors(roles, cost.sharing.host)
    scheduler = Scheduler.of(config, placement, macro_steps=macro_steps and alone)
    contents = Unseen(config.transfer.checksum)
    backend = VirtualBackend(cost, _say, lambda event: None, contents=contents, placement=roles)
    return serve(source, with_faults(backend, config.faults, roles), scheduler)


def _say(action: Action) -> tuple[Emitted, ...]:
    """Tokens whose ids mean nothing."""
    if not isinstance(action, Step):
        return ()
    firsts = [Emitted(chunk.rid, _tokens(1)) for chunk in action.chunks if chunk.last]
    return (*firsts, *(Emitted(d.rid, _tokens(d.count)) for d in action.decodes))


@functools.cache
def _tokens(count: int) -> tuple[int, ...]:
    return (0,) * count
