"""What every benchmark shares: rows with goals, and the file they go to."""

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import NamedTuple

from absl import flags
from rich.console import Console
from rich.table import Table

JSON = flags.DEFINE_string("json", None, "Where to write the rows.")


class Row(NamedTuple):
    """One measured number. goal: `<= x`, `>= x`, or nothing where there is none to meet."""

    what: str
    value: float
    unit: str
    goal: str = ""

    @property
    def met(self) -> bool | None:
        if not self.goal:
            return None
        sign, bound = self.goal.split()
        return self.value <= float(bound) if sign == "<=" else self.value >= float(bound)


def report(
    rows: Iterable[Row], path: str | None, setting: dict[str, object], *, brief: bool = False
) -> bool:
    """Prints the rows, `brief` only those with a goal; with a path also writes them all as JSON.
    Interrupted (Ctrl-C), it does so with those that are there. True when every goal is met."""
    came, rows, complete = rows, [], True
    try:
        for row in came:
            rows.append(row)
    except KeyboardInterrupt:
        print(f"interrupted after {len(rows)} rows")
        complete = False
    table = Table("what", "value", "unit", "goal", "met")
    for row in rows:
        if brief and not row.goal:
            continue
        met = {None: "", True: "yes", False: "NO"}[row.met]
        table.add_row(row.what, f"{row.value:.4g}", row.unit, row.goal, met)
    Console().print(table)
    meets = complete and all(row.met is not False for row in rows)
    if path:
        listed = [{**row._asdict(), "met": row.met} for row in rows]
        setting = {**setting, "complete": complete}
        text = json.dumps({"meets_goals": meets, "setting": setting, "rows": listed}, indent=1)
        Path(path).write_text(text)
    return meets


def seconds(run: Callable[[], object], times: int) -> float:
    """Median of `times` runs after one that does not count. `run` waits for its own result."""
    run()
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        taken.append(time.perf_counter() - began)
    return median(taken)
