"""Deadlines of equal length: who has made no progress for too long."""

Holder = int | tuple[str, int]
"""A request (its hand-off), or `("step", id)`."""


class Leases:
    """Leases of `term_ns`, kept in the order in which they run out. A term of 0 grants nothing."""

    def __init__(self, term_ns: int):
        self._term_ns = term_ns
        self._deadlines: dict[Holder, int] = {}

    def grant(self, holder: Holder, now_ns: int) -> None:
        """A new lease, or a renewal of the one that `holder` has."""
        if self._term_ns:
            self._deadlines.pop(holder, None)
            self._deadlines[holder] = now_ns + self._term_ns

    def drop(self, holder: Holder) -> None:
        self._deadlines.pop(holder, None)

    def run_out(self, now_ns: int) -> list[Holder]:
        """Takes out and returns those whose deadline is over, oldest first."""
        over = []
        for holder, deadline in self._deadlines.items():
            if deadline > now_ns:
                break
            over.append(holder)
        for holder in over:
            del self._deadlines[holder]
        return over

    @property
    def next_ns(self) -> int | None:
        """The earliest deadline."""
        return next(iter(self._deadlines.values()), None)
