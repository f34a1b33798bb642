"""Who does what, told by Drain and Switch alone, and who may take what because of it."""

from collections.abc import Collection, Container

from pdjax.core import events as ev
from pdjax.core.config import Placement, instances_of, role_of

JOBS = {"prefill": {"prefill"}, "decode": {"decode"}, "both": {"prefill", "decode"}}


class Jobs:
    """The jobs of all instances. An AssertionError names the law that was broken."""

    def __init__(self, placement: Placement):
        roles = {name: placement[role_of(name)] for name in instances_of(placement)}
        self._switches = {name for name, role in roles.items() if role.switches}
        self._does = {name: role.does for name, role in roles.items()}
        self._to = dict(self._does)
        self._late: dict[str, set[int]] = {name: set() for name in roles}  # came after its Drain

    def does(self, instance: str, job: str) -> bool:
        return job in JOBS[self._does[instance]]

    def _takes(self, instance: str, job: str) -> bool:
        return job in JOBS[self._does[instance]] & JOBS[self._to[instance]]

    def _left(self, instance: str, to: str) -> set[str]:
        return JOBS[self._does[instance]] - JOBS[to]

    def drain(self, drain: ev.Drain, gone: Container[str]) -> None:
        name, left = drain.instance, self._left(drain.instance, drain.to)
        assert name in self._switches, "its role does not switch"
        assert name not in gone and left, "nothing to drain"
        for job in left:
            others = [i for i in self._does if i != name and i not in gone and self._takes(i, job)]
            assert others, f"nobody is left to {job}"
        self._to[name] = drain.to
        self._late[name].clear()

    def switch(
        self, switch: ev.Switch, running: Collection[ev.Step], decoding: Collection[str]
    ) -> None:
        """decoding: the instances where requests decode, or will go on to."""
        name, left = switch.instance, self._left(switch.instance, switch.does)
        assert name in self._switches, "its role does not switch"
        assert not left or self._to[name] == switch.does, "left without a Drain"
        steps = [step for step in running if step.instance == name]
        if "prefill" in left:
            assert not any(step.chunks for step in steps), "a prompt is still computed"
        if "decode" in left:
            assert name not in decoding and not any(step.decodes for step in steps), (
                "a request still decodes"
            )
        self._does[name] = self._to[name] = switch.does
        self._late[name].clear()

    def came(self, rid: int, instance: str) -> None:
        """The request has memory there from now on, and had none before."""
        if self._to[instance] != self._does[instance]:
            self._late[instance].add(rid)

    def work(self, rid: int, instance: str, job: str) -> None:
        """The request gets work of this kind there."""
        late = rid in self._late[instance]
        assert not late or job not in self._left(instance, self._to[instance]), (
            f"{job} for one who came after the Drain"
        )
