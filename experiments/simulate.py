"""The same requests under every placement of a config, in virtual time.

    python -m experiments.simulate --config=configs/elastic.py

Steps last as the roofline of a catalogue model and chip says (`--model`, `--chip`), or as a file of
`experiments.calibrate` or `experiments.tpu_costs` does (`--cost`); pieces as the config's link
does. Printed are the shares of requests within both objectives, of all and, where the workload has
phases, of each; a line per change of an instance's job says when it began and ended. All seeds
count together. `placements.jsonl` in the results' folder has the same numbers.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from experiments.catalogue_flags import CHIP, MODEL, SEEDS
from experiments.flags import run_with_config
from pdjax import catalogue
from pdjax.core.config import Config
from pdjax.core.events import Drain, Record, Switch
from pdjax.cost import Cost
from pdjax.costs.batch import send_bytes_of
from pdjax.costs.files import read_cost
from pdjax.metrics import attainment_of, outcomes
from pdjax.plan import Hardware
from pdjax.sim import simulate
from pdjax.workload import make_source

COST = flags.DEFINE_string("cost", None, "A file with step times, in place of the chip's roofline.")


class Change(NamedTuple):
    """Seconds of the run at which an instance began to drain (or changed at once), and changed."""

    seed: int
    instance: str
    does: str
    began_s: float
    ended_s: float


class Result(NamedTuple):
    """What a placement gave: shares of requests within both objectives with 95% Wilson intervals,
    of all requests and of those of each phase; percentiles of TTFT and TPOT (s)."""

    placement: str
    requests: int
    attained: tuple[float, float, float]
    phases: tuple[float, ...]
    ttft_p50_s: float
    ttft_p90_s: float
    tpot_p50_s: float
    tpot_p90_s: float
    changes: tuple[Change, ...]


def main(config: Config, workdir: Path) -> None:
    workdir.mkdir(parents=True, exist_ok=True)
    shape = catalogue.model(MODEL.value)
    hardware = Hardware(shape, catalogue.chip(CHIP.value), chips=1)
    results = []
    for name, placement in tqdm(config.placements.items(), unit="placement"):
        if COST.value:
            cost = read_cost(COST.value, shape, config.transfer.link, send_bytes_of(shape))
        else:
            cost = hardware.cost(config, placement)
        results.append(served(config, name, cost, range(SEEDS.value)))
    with open(workdir / "placements.jsonl", "wb") as file:
        file.writelines(msgspec.json.encode(result._asdict()) + b"\n" for result in results)
    show(results, config)


def served(config: Config, name: str, cost: Cost, seeds: Sequence[int]) -> Result:
    """One placement under all seeds."""
    starts = [phase.at for phase in config.workload.phases]
    found, times, changes = [], [], []
    for seed in seeds:
        source = make_source(
            config.workload, seed, encode=None, vocab=1, context=config.model.context, eos=()
        )
        changed: list[Record] = []
        ends = outcomes(_kept(simulate(config, name, source, cost), changed))
        order = np.argsort(ends.arrival_s, kind="stable")  # ids ascend with arrivals
        found.append(ends.attained(config.slo)[order])
        times.append(np.stack([ends.ttft_s, ends.tpot_s]))
        changes += _changes(changed, seed)
    attained, (ttft_s, tpot_s) = np.stack(found), np.concatenate(times, axis=1)
    share = attainment_of(int(attained.sum()), attained.size)
    parts = np.split(attained, starts, axis=1)
    return Result(
        name,
        attained.size,
        (share.share, share.low, share.high),
        tuple(float(part.mean()) for part in parts),
        _percentile(ttft_s, 50),
        _percentile(ttft_s, 90),
        _percentile(tpot_s, 50),
        _percentile(tpot_s, 90),
        tuple(changes),
    )


def _percentile(seconds: np.ndarray, percent: float) -> float:
    return float(np.nanpercentile(seconds, percent))


def _kept(records: Iterator[Record], changed: list[Record]) -> Iterator[Record]:
    """Passes a log on, and keeps what it says of jobs."""
    for record in records:
        if isinstance(record.body, Drain | Switch):
            changed.append(record)
        yield record


def _changes(records: Sequence[Record], seed: int) -> Iterator[Change]:
    began: dict[str, float] = {}
    for record in records:
        t_s, body = record.t_ns / 1e9, record.body
        if isinstance(body, Drain):
            began[body.instance] = t_s
        elif isinstance(body, Switch):
            yield Change(seed, body.instance, body.does, began.pop(body.instance, t_s), t_s)


def show(results: Sequence[Result], config: Config) -> None:
    slo = config.slo
    table = Table(
        "placement", "in time", "95 %", "TTFT p50", "p90", "TPOT p50", "p90", "changes",
        title=f"{results[0].requests} requests each; TTFT <= {slo.ttft_s:g} s and TPOT <= "
        f"{slo.tpot_s * 1e3:g} ms",
    )  # fmt: skip
    for r in results:
        share, low, high = r.attained
        table.add_row(
            r.placement, f"{share:.1%}", f"{low:.1%} to {high:.1%}",
            f"{r.ttft_p50_s:.3g} s", f"{r.ttft_p90_s:.3g} s",
            f"{r.tpot_p50_s * 1e3:.3g} ms", f"{r.tpot_p90_s * 1e3:.3g} ms", str(len(r.changes)),
        )  # fmt: skip
    console = Console(width=120)
    console.print(table)
    for r in results:
        if config.workload.phases:
            parts = ", ".join(f"{part:.1%}" for part in r.phases)
            console.print(f"{r.placement}: in time, phase by phase: {parts}", highlight=False)
        for change in r.changes:
            seed, instance, does, began_s, ended_s = change
            console.print(
                f"{r.placement}, seed {seed}: {instance} drained from {began_s:.1f} s on, "
                f"and did {does} from {ended_s:.1f} s on",
                highlight=False,
            )


if __name__ == "__main__":
    run_with_config(main)
