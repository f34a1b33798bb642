"""Processors that instances share: steps that run together slow each other down.

Roles `beside` one another have one device for two programs, and all virtual devices of a CPU are
the same cores. The model is a fluid one, as that of links: every step has a speed, which changes
whenever another one on its processor begins to compute or stops. It has no clock.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pdjax.core.placement import Placement, instances_of, role_of


@dataclass(frozen=True)
class Sharing:
    """How fast the steps of instances on one processor are.

    speed: of each of two steps that run together; 1 is as fast as alone, and at 1/2 they share what
        there is. n steps have the speed 1 / (1 + (n - 1) (1 / speed - 1)).
    host: whether all instances of a placement are on one processor; otherwise only those of roles
        beside one another are.
    """

    speed: float = 0.5
    host: bool = False

    def __post_init__(self):
        if not 0 < self.speed <= 1:
            raise ValueError(f"`speed` is {self.speed}; it must be above 0 and at most 1")

    def of(self, together: int) -> float:
        return 1 / (1 + (together - 1) * (1 / self.speed - 1))


@dataclass(slots=True, eq=False)
class Computing:
    """Something that computes: `left_ns` to go at full speed, from `since_ns` on at `speed`."""

    left_ns: float = 0.0
    since_ns: int = 0
    speed: float = 1.0

    @property
    def due_ns(self) -> int:
        """When it is over, if nothing changes. Never early by rounding."""
        return self.since_ns + math.ceil(self.left_ns / self.speed - 1e-6)

    def set_speed(self, now_ns: int, speed: float) -> None:
        self.left_ns = max(0.0, self.left_ns - (now_ns - self.since_ns) * self.speed)
        self.since_ns, self.speed = now_ns, speed


@dataclass
class Processors:
    """Who computes where. moved: told of a Computing whose end another one has moved."""

    sharing: Sharing
    placement: Placement
    moved: Callable[..., None]
    _on: dict[str, list[Computing]] = field(default_factory=dict)

    def __post_init__(self):
        self._of = shared_processors(self.placement, self.sharing.host)

    def begin(self, now_ns: int, instance: str, it: Computing, length_ns: int) -> None:
        """`it` computes from now on, for `length_ns` if it stays alone."""
        it.left_ns, it.since_ns, it.speed = length_ns, now_ns, 1.0
        processor = self._of.get(instance)
        if processor is not None:
            running = self._on.setdefault(processor, [])
            running.append(it)
            it.speed = self.sharing.of(len(running))
            self._set_speeds(now_ns, processor)

    def end(self, now_ns: int, instance: str, it: Computing) -> None:
        """`it` has ended, or waits."""
        processor = self._of.get(instance)
        if processor is not None:
            self._on[processor].remove(it)
            self._set_speeds(now_ns, processor)

    def _set_speeds(self, now_ns: int, processor: str) -> None:
        running = self._on[processor]
        speed = self.sharing.of(max(1, len(running)))
        for it in running:
            due_ns = it.due_ns
            it.set_speed(now_ns, speed)
            if it.due_ns != due_ns:
                self.moved(it)


def shared_processors(placement: Placement, host: bool) -> Mapping[str, str]:
    """The processor of every instance that does not have one for itself."""
    if host:
        names = instances_of(placement)
        return dict.fromkeys(names, "host") if len(names) > 1 else {}
    hosts = {role.beside for role in placement.values() if role.beside}
    return {
        instance: f"{placement[role].beside or role}/{instance.rpartition('/')[2]}"
        for instance in instances_of(placement)
        if (role := role_of(instance)) in hosts or placement[role].beside
    }
