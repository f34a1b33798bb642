"""Policies that switch for the sake of switching, by the names `wild` and `turning`."""

import zlib

from pdjax.core.config import SLO, Does, Switching
from pdjax.core.policies.switching import SWITCHERS, Move, Situation


def wild(rules: Switching, slo: SLO, now: Situation) -> list[Move]:
    """Anything goes, as good as drawn."""
    able = [i for i in now.instances if i.switches]
    drawn = zlib.crc32(repr(now).encode())
    jobs: list[Does] = ["prefill", "decode", "both"]
    return [(able[drawn % len(able)].name, jobs[drawn // 16 % 3])] if able else []


def turning(rules: Switching, slo: SLO, now: Situation) -> list[Move]:
    """The last one that can goes over to the other side, and back, as often as it is asked."""
    one = [i for i in now.instances if i.switches][-1]
    return [(one.name, "decode" if one.does == "prefill" else "prefill")] if one.settled else []


SWITCHERS["wild"] = wild
SWITCHERS["turning"] = turning
