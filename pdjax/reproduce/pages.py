"""The folder of a reproduction, and the pages made of one or of many.

A reproduction: result.json (all there is), figure.svg, rows.csv. Beside the folders of many lies
index.html, which is made of their result.json alone.
"""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import jinja2
import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from pdjax.reproduce.result import Reproduction, Row, Value

_RESULT = "result.json"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A reproduction and where it came from. name: of its config; about: the config's docstring.
    seconds: of processor time. why_not: instead of a reproduction, the line that says why there is
    none."""

    name: str
    about: str
    seconds: float = 0.0
    commit: str = ""
    reproduction: Reproduction | None = None
    why_not: str = ""


def write(folder: Path, result: Result) -> None:
    """Writes what was reproduced; result.json is the last, so a folder that has it is whole."""
    assert result.reproduction is not None
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "figure.svg").write_text(result.reproduction.figure, encoding="utf-8")
    with open(folder / "rows.csv", "w", newline="", encoding="utf-8") as file:
        rows = csv.DictWriter(file, Row.__struct_fields__)
        rows.writeheader()
        rows.writerows(map(msgspec.structs.asdict, result.reproduction.rows))
    (folder / _RESULT).write_bytes(msgspec.json.format(msgspec.json.encode(result)))


def read(folder: Path) -> Result | None:
    """What `write` wrote, or None where there is nothing or something of another version."""
    try:
        return msgspec.json.decode((folder / _RESULT).read_bytes(), type=Result)
    except (OSError, msgspec.MsgspecError):
        return None


def text(value: Value) -> str:
    """Counts with all of their digits, other numbers with four."""
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.4g}"


def between(row: Row) -> str:
    """The interval of what was obtained, or nothing (where all seeds agree, too)."""
    low, high = row.interval or (0.0, 0.0)
    return f"{low:.3g} to {high:.3g}" if low < high else ""


def table(result: Result) -> str:
    """The rows for a terminal."""
    if result.reproduction is None:
        return f"{result.name}: not run: {result.why_not}"
    shown = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, title=result.reproduction.title, title_justify="left"
    )
    for column in ("what", "published", "obtained", "95 %", "unit", "criterion", "verdict"):
        shown.add_column(column, justify="right" if column in ("published", "obtained") else "left")
    for row in result.reproduction.rows:
        values = row.what, text(row.published), text(row.obtained), between(row)
        shown.add_row(*values, row.unit, row.criterion, row.verdict or "(beside)")
    out = io.StringIO()
    console = Console(file=out, width=120, markup=False)
    console.print(shown)
    console.print(f"Samples: {result.reproduction.samples}.")
    for note in result.reproduction.notes:
        console.print(f"- {note}")
    summary = f"{result.name}: {result.reproduction.verdict}, {result.seconds:.1f} processor s"
    return f"{out.getvalue().rstrip()}\n{summary}"


def write_page(
    path: Path, title: str, results: Sequence[Result], planned: int | None = None
) -> Path:
    """One page with the tables and figures of all results. planned: how many there will be."""
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("pdjax"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    page = templates.get_template("reproductions.html.j2").render(
        title=title, results=results, planned=planned or len(results), text=text, between=between
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path
