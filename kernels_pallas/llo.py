"""The static schedule of a TPU kernel, read from what the TPU compiler dumps.

A TPU core executes one VLIW bundle per cycle when nothing stalls, so the bundles on a loop's path
are a lower bound of its cycles, and which slots they fill says which unit bounds it. Two things it
does not see: waits for copies, and waits for results of the matrix unit.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DUMPED_PASSES = "(final_.*|post-delay-converter)"
"""Labels of the passes whose dumps are read here, for --xla_jf_dump_llo_pass_label_regex."""

_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*:\s*>*\s*\{", re.M)
_BRANCH = re.compile(r"sbr\.rel (\(.*?\) )?target = \$region(\d+)")
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
_COPY = re.compile(r"= dma\.(hbm_to_vmem|general) ")  # general: where the two ends differ in tiling
_VMEM = re.compile(r"space=vmem, size = (0x[0-9a-f]+|\d+), offset = (0x[0-9a-f]+|\d+)")


@dataclass(frozen=True)
class Branch:
    """A jump of bundle `at` to bundle `target`; the `delay` bundles after it are executed too."""

    at: int
    target: int
    always: bool


@dataclass(frozen=True)
class Loop:
    """Bundles [begin, end), and the loops directly inside."""

    begin: int
    end: int
    inner: tuple["Loop", ...]


@dataclass(frozen=True)
class Way:
    """Bundles that one pass through a loop's body executes, without the loops inside.

    used: slots filled, by unit. matrix: share of the matrix unit's slots that are filled.
    filled: of the slots of all compute units (matrix, cross-lane, vector, transcendental, load,
    store), the share of the fullest one: 1 means that unit bounds the loop. copies: started.
    """

    bundles: int
    used: dict[str, int]
    matrix: float
    filled: float
    copies: int


@dataclass(frozen=True)
class Schedule:
    """One kernel's code. slots: per bundle, how many slots of each unit it fills."""

    units: tuple[str, ...]
    capacity: tuple[int, ...]
    slots: Sequence[tuple[int, ...]]
    copies: Sequence[bool]
    branches: tuple[Branch, ...]
    delay: int
    vmem_bytes: int

    @property
    def loops(self) -> tuple[Loop, ...]:
        """The outermost loops."""
        spans = {
            (b.target, min(b.at + 1 + self.delay, len(self.slots)))
            for b in self.branches
            if b.target <= b.at
        }
        return _nest(sorted(spans, key=lambda span: (span[0], -span[1])))

    @property
    def spills(self) -> int:
        """Bundles that store or reload a spilled vector register."""
        columns = [i for i, unit in enumerate(self.units) if unit.endswith((":FILL", ":SPILL"))]
        return sum(any(row[i] for i in columns) for row in self.slots)

    def matrix_loops(self) -> tuple[Loop, ...]:
        """The loop that uses the matrix unit most, after those that contain it, outermost first."""
        chain: tuple[Loop, ...] = ()
        loops = self.loops
        while any(self._matrix_slots(loop) for loop in loops):
            chain += (max(loops, key=self._matrix_slots),)
            loops = chain[-1].inner
        return chain

    def path(self, loop: Loop, copies: int = 1) -> Way:
        """The steady way through a loop's body: the one with most matrix products; of those, one
        that starts at least `copies` copies, if there is one; of those, the one with fewest
        bundles. How many copies one pass needs is for who knows the kernel to say: the code's
        conditions, such as of the very first copies, are not looked into."""
        way = self._steady(loop, copies)
        used = {
            unit: sum(self.slots[i][column] for i in way) for column, unit in enumerate(self.units)
        }
        room = {
            unit: size * max(len(way), 1)
            for unit, size in zip(self.units, self.capacity, strict=True)
        }
        busy = [used[unit] / room[unit] for unit in self.units if unit in _COMPUTE]
        return Way(
            len(way),
            used,
            used["MXU"] / room["MXU"],
            max(busy),
            sum(self.copies[i] for i in way),
        )

    def _matrix_slots(self, loop: Loop) -> int:
        column = self.units.index("MXU")
        return sum(row[column] for row in self.slots[loop.begin : loop.end])

    def _steady(self, loop: Loop, copies: int) -> list[int]:
        """Best path over the graph of bundles; going back is left out, so it has no cycle. Loops
        inside are gone around where there is a way: they are for what is rare, such as the end of
        a text."""
        inside = {i for child in loop.inner for i in range(child.begin, child.end)}
        jumps: dict[int, list[int]] = {}
        falls = dict.fromkeys(range(loop.begin, loop.end), True)
        for branch in self.branches:
            leaves = branch.at + self.delay
            if branch.at < branch.target <= loop.end and loop.begin <= branch.at:
                jumps.setdefault(leaves, []).append(branch.target)
                falls[leaves] = not branch.always
        column = self.units.index("MXU")
        # By the bundle that is about to run, then by copies started so far: the best (products,
        # -bundles), and the (bundle, copies) that it came from.
        best: dict[int, dict[int, tuple[tuple[int, int], tuple[int, int] | None]]] = {
            loop.begin: {0: ((0, 0), None)}
        }
        for i in range(loop.begin, loop.end):
            for copied, ((products, saved), _) in best.get(i, {}).items():
                if i in inside:
                    score, after = (products, saved - _DETOUR), copied
                else:
                    score = (products + self.slots[i][column], saved - 1)
                    after = min(copied + self.copies[i], copies)
                for target in jumps.get(i, []) + [i + 1] * falls[i]:
                    states = best.setdefault(target, {})
                    if after not in states or states[after][0] < score:
                        states[after] = (score, (i, copied))
        ends = best[loop.end]
        most = max(score[0] for score, _ in ends.values())
        at = loop.end, max(copied for copied, (score, _) in ends.items() if score[0] == most)
        way: list[int] = []
        while (before := best[at[0]][at[1]][1]) is not None:
            at = before
            way.append(at[0])
        return [i for i in reversed(way) if i not in inside]


_DETOUR = 1000  # bundles that a path may take to go around one of a loop inside
_COMPUTE = ("MXU", "XLU", "VALU", "EUP", "VLOAD", "VSTORE")


def read(folder: Path, kernel: str, delay: int) -> Schedule:
    """The schedule of the HLO instruction `kernel`, from the compiler's dumps in `folder`.

    delay: bundles that are still executed after a branch. Raises FileNotFoundError with the
    kernels that are there.
    """
    code, slots, memory = (
        _text(folder, kernel, label)
        for label in (
            "final_bundles",
            "final_hlo-static-per-bundle-utilization",
            "post-delay-converter",
        )
    )
    return parse(code, slots, memory, delay)


def parse(code: str, utilization: str, memory: str, delay: int) -> Schedule:
    """See `read`; takes the texts of final_bundles, final_hlo-static-per-bundle-utilization and
    post-delay-converter."""
    starts = [match.start() for match in _BUNDLE.finditer(code)]
    bundles = [code[a:b] for a, b in zip(starts, [*starts[1:], len(code)], strict=True)]
    _, units, capacity, _, *rows = utilization.strip().splitlines()
    slots = [tuple(map(int, row.split())) for row in rows]
    # The table has one row of zeros more than there are bundles.
    slots = slots[: len(bundles)]
    where = {int(r): i for i, text in enumerate(bundles) for r in _REGION.findall(text)}
    # A region without code is named nowhere; a jump to it is taken as never made.
    branches = tuple(
        Branch(i, where[int(region)], not condition)
        for i, text in enumerate(bundles)
        for condition, region in _BRANCH.findall(text)
        if int(region) in where
    )
    ends = [int(size, 0) + int(offset, 0) for size, offset in _VMEM.findall(memory)]
    return Schedule(
        tuple(name.strip() for name in units.split(",")),
        tuple(map(int, capacity.split())),
        slots,
        [_COPY.search(text) is not None for text in bundles],
        branches,
        delay,
        max(ends, default=0),
    )


def _nest(spans: list[tuple[int, int]]) -> tuple[Loop, ...]:
    """Spans, sorted by where they begin, longest first, as trees."""
    loops: list[Loop] = []
    while spans:
        (begin, end), rest = spans[0], spans[1:]
        inner = [span for span in rest if span[0] < end]
        loops.append(Loop(begin, end, _nest(inner)))
        spans = rest[len(inner) :]
    return tuple(loops)


def _text(folder: Path, kernel: str, label: str) -> str:
    found = sorted(folder.glob(f"*-{kernel}-[0-9]*-{label}.txt"))
    if not found:
        there = {path.name.split("-", 1)[1] for path in folder.glob("*final_bundles.txt")}
        raise FileNotFoundError(f"no `{label}` of `{kernel}` in {folder}, which has {there}")
    return found[-1].read_text()
