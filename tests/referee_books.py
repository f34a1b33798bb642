"""What the referee keeps beside memory: texts as far as a log tells them, and leases."""

from collections.abc import Hashable, Iterable

from referee_memory import Token

from pdjax.core.prefix import extend
from pdjax.core.request import Request


class Texts:
    """Which tokens of different requests are known to be the same, and all before them too: those
    in blocks of equal hashes (as core.prefix defines them), of prompts and of what they got."""

    def __init__(self, block: int):
        self._block = block
        self._chains: dict[int, tuple[list[int], tuple[int, ...]]] = {}  # hashes, and the rest

    def add(self, request: Request) -> None:
        self._chains[request.id] = list(request.blocks), request.tail

    def extend(self, rid: int, tokens: tuple[int, ...]) -> None:
        blocks, tail = self._chains[rid]
        if blocks or tail:
            new, tail = extend(blocks[-1] if blocks else None, tail, tokens, self._block)
            self._chains[rid] = [*blocks, *new], tail

    def same(self, token: Token, rid: int) -> bool:
        if token.rid == rid:
            return True
        block = token.position // self._block
        chains = [self._chains[each][0] for each in (token.rid, rid)]
        return all(len(c) > block for c in chains) and chains[0][block] == chains[1][block]


class Leases:
    """When something last happened for each holder, and who will look. A term of 0: no leases."""

    def __init__(self, term_ns: int):
        self._term_ns = term_ns
        self._renewed: dict[Hashable, int] = {}
        self._alarms: list[int] = []

    def renew(self, holder: Hashable, now_ns: int) -> None:
        self._renewed[holder] = now_ns

    def over(self, holder: Hashable, now_ns: int) -> bool:
        return bool(self._term_ns) and self._renewed[holder] + self._term_ns <= now_ns

    def alarm(self, at_ns: int, now_ns: int) -> None:
        assert at_ns >= now_ns, "an alarm for the past"
        self._alarms.append(at_ns)

    def ring(self, now_ns: int) -> None:
        self._alarms = [at_ns for at_ns in self._alarms if at_ns > now_ns]

    def check(self, waited: Iterable[Hashable], now_ns: int) -> None:
        """`waited`: whose pieces are on their way and were not cancelled."""
        for holder in waited if self._term_ns else ():
            assert self._alarms, "nobody will look at what is on its way"
            assert self._renewed[holder] + self._term_ns >= now_ns, "out for longer than the lease"
