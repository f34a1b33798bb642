"""Which instance gets another job. A policy is a pure function; write yours beside these.

It is asked every `switching.every_s` while requests are open, about the instances that are up, and
answers with moves; an instance that leaves a job finishes what it has of it first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pdjax.core.config import SLO, Does, Switching


@dataclass
class Pace:
    """What an instance's steps have shown: ns of those with prompts and their tokens, ns of those
    with decodes and their iterations."""

    prompt_ns: int = 0
    prompt_tokens: int = 0
    decode_ns: int = 0
    iterations: int = 0


class Standing(NamedTuple):
    """One instance. home: what its role does; does, to: its job, and the one that it will have when
    it has drained. prompt_tokens: of the `prompts` sent there and not computed yet. decodes:
    requests whose place to decode it is. ttft_s: until all those prompts have their first token;
    itl_s: between two tokens of those who decode there, both as far as is known."""

    name: str
    home: Does
    does: Does
    to: Does
    switches: bool
    prompt_tokens: int
    prompts: int
    decodes: int
    ttft_s: float
    itl_s: float

    @property
    def settled(self) -> bool:
        return self.does == self.to


class Situation(NamedTuple):
    """All instances that are up. waiting: prompts that no decode instance had room for at the last
    decision and none has now. quiet_s: since an instance last began or ended a change."""

    instances: Sequence[Standing]
    waiting: int
    quiet_s: float


Move = tuple[str, Does]
"""(instance, what it shall do)"""
Switcher = Callable[[Switching, SLO, Situation], Sequence[Move]]


def never(rules: Switching, slo: SLO, now: Situation) -> Sequence[Move]:
    return ()


def slo(rules: Switching, slo: SLO, now: Situation) -> Sequence[Move]:
    """One instance goes over where all of one side miss its objective and all of the other are
    below `sensitivity` times theirs, one change at a time.

    The two conditions are those of Dynamo's load-based planner for one more instance and for one
    less (all estimates over the objective; all below objective times sensitivity, 0.8, every 5 s,
    never below 1); both at once and a flip, as of Arrow's stateless instances. Prompts that wait
    for a place to decode miss the ITL, and what then queues behind them is no sign of prefill.
    """
    if now.quiet_s < rules.cooldown_s or not all(i.settled for i in now.instances):
        return ()
    prefill = [i for i in now.instances if i.does == "prefill"]
    decode = [i for i in now.instances if i.does == "decode"]
    slow_prefill = all(i.ttft_s > slo.ttft_s for i in prefill)
    idle_prefill = all(i.ttft_s < slo.ttft_s * rules.sensitivity for i in prefill)
    slow_decode = all(i.itl_s > slo.tpot_s for i in decode)
    idle_decode = all(i.itl_s < slo.tpot_s * rules.sensitivity for i in decode)
    if now.waiting or (slow_decode and idle_prefill):
        return _give(rules, prefill, "decode")
    if slow_prefill and idle_decode:
        return _give(rules, decode, "prefill")
    return ()


def _give(rules: Switching, side: Sequence[Standing], to: Does) -> Sequence[Move]:
    """The one with the least to finish, if enough are left."""
    able = [i for i in side if i.switches]
    if len(side) <= rules.minimum or not able:
        return ()
    return [(min(able, key=lambda i: (i.prompt_tokens, i.decodes)).name, to)]


def mixed(rules: Switching, slo: SLO, now: Situation) -> Sequence[Move]:
    """Splitwise's mixed pool (ISCA 2024, section IV): while every prompt machine has more than
    `prompts_above` tokens before it a token machine takes prompts too, and while no token machine
    has memory a prompt machine keeps what it prefilled; each goes back when it has no more of the
    other kind. One joins at a time on either side, and only when those that joined are full, too.
    """
    return [*_help_prefill(rules, now), *_help_decode(now)]


def _help_prefill(rules: Switching, now: Situation) -> Sequence[Move]:
    takers = [i for i in now.instances if "decode" not in (i.does, i.to)]
    free = [i for i in takers if i.prompt_tokens <= rules.prompts_above]
    if not free:
        able = [i for i in now.instances if i.switches and i.does == i.to == "decode"]
        return [(min(able, key=lambda i: i.decodes).name, "both")] if able else ()
    if all(i.home == "decode" for i in free):
        return ()
    helpers = [i for i in now.instances if i.home == "decode" and i.does == "both"]
    return [(i.name, "decode") for i in helpers if i.settled and not i.prompts]


def _help_decode(now: Situation) -> Sequence[Move]:
    prompts = [i for i in now.instances if i.home == "prefill"]
    if now.waiting:
        able = [i for i in prompts if i.switches and i.to == "prefill"]
        return [(min(able, key=lambda i: i.prompt_tokens).name, "both")] if able else ()
    return [(i.name, "prefill") for i in prompts if i.does == "both" and i.settled]


SWITCHERS: dict[str, Switcher] = {"never": never, "slo": slo, "mixed": mixed}
