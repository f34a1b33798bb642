"""How many instances for prefill and for decode, of which tp; or is it better not to separate them?

    python -m experiments.plan --config=configs/plan.py --chips=8

Every form of the config's placements, in every size that fills the chips, under the roofline of
a catalogue model and chip. What each reaches is printed and written to plan.jsonl in the results'
folder as soon as it is known: stop it whenever you like, the same command goes on from there.
"""

import io
from pathlib import Path

import msgspec
from absl import flags
from rich import box
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from experiments.catalogue_flags import CHIP, MODEL, SEEDS
from experiments.flags import run_with_config
from pdjax import catalogue
from pdjax.core.config import Config
from pdjax.metrics import GROWTH
from pdjax.plan import (
    Hardware,
    Result,
    add_result,
    candidates,
    read_results,
    search,
    verdict,
)

CHIPS = flags.DEFINE_integer("chips", 8, "How many of them there are.", 1)
TPS = flags.DEFINE_list("tps", "1,2,4,8", "Chips per instance to try.")
TOLERANCE = flags.DEFINE_float("tolerance", 0.05, "How close, relatively, a goodput is found.", 0.0)


def main(config: Config, workdir: Path) -> None:
    shape, chip = catalogue.model(MODEL.value), catalogue.chip(CHIP.value)
    hardware = Hardware(shape, chip, CHIPS.value, tuple(map(int, TPS.value)))
    seeds = range(SEEDS.value)
    asked = (config, shape.name, chip.name, hardware.chips, hardware.tps, len(seeds))
    setting = msgspec.json.encode((*asked, TOLERANCE.value)).decode()
    path = workdir / "plan.jsonl"
    known, results = read_results(path, setting), []
    found = search(config, hardware, seeds=seeds, tolerance=TOLERANCE.value, known=known)
    try:
        for result in tqdm(found, total=len(candidates(config, hardware)), unit="candidate"):
            results.append(result)
            if result.name not in known:
                add_result(path, result)
    except KeyboardInterrupt:
        print(f"\nstopped; the same command goes on from {path}")
    for line in (
        *question_of(config, hardware, len(seeds)),
        table(results),
        verdict(results, config),
    ):
        print(line)


def question_of(config: Config, hardware: Hardware, seeds: int) -> list[str]:
    """What was asked, and what the columns mean."""
    slo, requests = config.slo, config.workload.requests
    return [
        f"{hardware.shape.name} on {hardware.chips} {hardware.chip.name}: the highest rate "
        f"(requests/s) at which {slo.target:.0%} of requests have TTFT <= {slo.ttft_s:g} s and "
        f"TPOT <= {1e3 * slo.tpot_s:g} ms, and the queue gains at most {GROWTH:.0%} of what comes.",
        f"{seeds} seeds of {requests} requests at every rate; 95 %: of the rate at which seeds "
        "miss the target, Student's t (queues are judged over all seeds, so where they end it, "
        "that is narrow). at best: by closed form, every request a mean one.",
    ]


def table(results: list[Result]) -> str:
    """The candidates that were searched, best first, and why the others were not."""
    searched = sorted((r for r in results if not r.skipped), key=lambda r: r.per_chip, reverse=True)
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("candidate", no_wrap=True)
    for column in ("chips", "rate per chip", "95 %", "rate", "at best", "in time", "queue gains"):
        shown.add_column(column, justify="right", no_wrap=True)
    shown.add_column("above that rate", no_wrap=True)
    for r in searched:
        low, high = r.interval
        interval = "" if r.low is None else f"{low:.3g} to {high:.3g}"
        numbers = (f"{r.per_chip:.3g}", interval, f"{r.rate:.4g}", f"{r.bound:.4g}")
        state = (f"{r.in_time:.1%}", f"{r.growth:.1%}", r.ended) if r.rate else ("", "", r.ended)
        shown.add_row(r.name, str(r.chips), *numbers, *state)
    out = io.StringIO()
    Console(file=out, width=190).print(shown)
    left_out = [f"not searched: {r.name}: {r.skipped}" for r in results if r.skipped]
    lines = [line.rstrip() for line in out.getvalue().rstrip().splitlines()]
    return "\n".join([*lines, "", *left_out, ""])


if __name__ == "__main__":
    run_with_config(main)
