"""Is the shape of a claim about KV memory true here? Four forms of it, beside what was claimed.

    python -m experiments.pool_forms --config=configs/pool_forms.py --repeats=3

The claim, of a 7B model on an A10 at batch 8, is a table without a reference: separating prefill
from decode lowers TTFT step by step, from one pool to a logical split, to two pools, to two pools
with smaller decode blocks, while TPOT and memory fall and throughput rises. Its numbers are those
of another model and machine, and its memory is all of the GPU's; here memory is the KV that
requests hold. What can be compared is the direction of each change against `native`.

Every placement is served --repeats times, each time another one first. A cell is called `as
claimed` or `not so` only where all repeats agree; three repeats take about 10 minutes on 2 cores.
The table is printed, and written to pool_forms.json in the results' folder. With
`--config.clock.kind=modelled` it repeats to the digit, but programs that share a device do not slow
each other then: only memory and fragmentation mean anything.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from absl import flags
from rich.console import Console
from rich.table import Table

from experiments.flags import run_with_config, setup_devices
from pdjax.core.config import Config, ConfigError
from pdjax.metrics import Run, summary
from pdjax.reproduce.forms import CLAIMED, SAME

REPEATS = flags.DEFINE_integer("repeats", 3, "Times that every placement is served.", 1)

COLUMNS = ("TTFT p50 ms", "TPOT p50 ms", "requests/s", "KV held, mean MB")


class Cell(NamedTuple):
    """One number: its median over repeats, its ratios to `native`, claimed and in each repeat."""

    form: str
    column: str
    value: float
    claimed_ratio: float
    ratios: tuple[float, ...]

    @property
    def verdict(self) -> str:
        seen = {direction(ratio) for ratio in self.ratios}
        if len(seen) > 1:
            return "unclear"
        return "as claimed" if seen == {direction(self.claimed_ratio)} else "not so"


def direction(ratio: float) -> str:
    if abs(ratio - 1) <= SAME:
        return "same"
    return "higher" if ratio > 1 else "lower"


def cells(repeats: Sequence[Mapping[str, Sequence[float]]]) -> list[Cell]:
    """repeats: for each, what every placement measured, by COLUMNS."""
    found = []
    for form, claimed in CLAIMED.items():
        for i, column in enumerate(COLUMNS):
            ratios = tuple(values[form][i] / values["native"][i] for values in repeats)
            value = median(values[form][i] for values in repeats)
            found.append(Cell(form, column, value, claimed[i] / CLAIMED["native"][i], ratios))
    return found


def measured(runs: Mapping[str, Run]) -> dict[str, tuple[float, ...]]:
    """What each placement measured, by COLUMNS."""
    numbers: dict[str, dict[str, Any]] = {name: summary(run) for name, run in runs.items()}
    token_mb = numbers["two_pools"]["kv_token_bytes"] / 1e6  # one model: the same everywhere
    return {
        name: (
            s["ttft_p50_s"] * 1e3,
            s["tpot_p50_s"] * 1e3,
            s["requests_per_s"],
            s["kv_held_tokens_mean"] * token_mb,
        )
        for name, s in numbers.items()
    }


def fragmentation(run: Run) -> str:
    """Internal, and of slabs external, of each pool."""
    s, parts = summary(run), []
    for name in run.pools["pool"].unique():
        parts.append(f"{name} {s[f'{name}.fragmentation_internal']:.0%}")
        if s[f"{name}.fragmentation_external"] is not None:
            parts.append(f"external {s[f'{name}.fragmentation_external']:.0%}")
    return ", ".join(parts)


def show(found: Sequence[Cell], fragmented: Mapping[str, str]) -> None:
    table = Table("form", "", "measured", "claimed", "repeats", "verdict", title="against native")
    for form in CLAIMED:
        for cell in found:
            if cell.form == form:
                ratios = (f"x{cell.claimed_ratio:.2f}", " ".join(f"x{r:.2f}" for r in cell.ratios))
                said = (*ratios, cell.verdict) if form != "native" else ()
                table.add_row(form, cell.column, f"{cell.value:.3g}", *said)
        table.add_row(form, "fragmentation", fragmented[form], end_section=True)
    Console(width=110).print(table)


def main(config: Config, workdir: Path) -> None:
    if missing := set(CLAIMED) - set(config.placements):
        raise ConfigError(
            f"the config has no placement {', '.join(sorted(missing))}; the claim compares "
            f"{', '.join(CLAIMED)}"
        )
    setup_devices()
    from pdjax.experiment import compare

    repeats = []
    names = list(CLAIMED)
    for i in range(REPEATS.value):
        first = i % len(names)  # the one that is served first is served by a cold process
        order = {name: config.placements[name] for name in names[first:] + names[:first]}
        runs = compare(config.replace(placements=order), workdir / f"repeat-{i}")
        repeats.append(measured(runs))
        found = cells(repeats)  # written after each repeat: an interrupted one keeps the others
        rows = [{**cell._asdict(), "verdict": cell.verdict} for cell in found]
        (workdir / "pool_forms.json").write_text(json.dumps({"rows": rows}, indent=1))
    show(found, {form: fragmentation(runs[form]) for form in CLAIMED})


if __name__ == "__main__":
    run_with_config(main)
