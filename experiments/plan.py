"""How many instances for prefill and for decode, of which tp; or is it better not to separate them?

    python -m experiments.plan --config=configs/plan.py --chips=8

Every form of the config's placements, in every size that fills the chips, under the roofline of
a catalogue model and chip. What each reaches is printed and written to plan.jsonl in the results'
folder as soon as it is known: stop it whenever you like, the same command goes on from there.
"""

from pathlib import Path

import msgspec
from absl import flags
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from experiments.flags import run_with_config
from pdjax import catalogue
from pdjax.core.config import Config
from pdjax.plan import (
    Hardware,
    Result,
    add_result,
    candidates,
    read_results,
    search,
    verdict,
)

MODEL = flags.DEFINE_string("model", "llama3-8b", "A model of the catalogue.")
CHIP = flags.DEFINE_string("chip", "h100", "A chip of the catalogue.")
CHIPS = flags.DEFINE_integer("chips", 8, "How many of them there are.", 1)
TPS = flags.DEFINE_list("tps", "1,2,4,8", "Chips per instance to try.")
SEEDS = flags.DEFINE_integer("seeds", 3, "Seeds that every rate is served under.", 1)
TOLERANCE = flags.DEFINE_float("tolerance", 0.05, "How close, relatively, a goodput is found.", 0.0)


def main(config: Config, workdir: Path) -> None:
    shape, chip = catalogue.model(MODEL.value), catalogue.chip(CHIP.value)
    hardware = Hardware(shape, chip, CHIPS.value, tuple(map(int, TPS.value)))
    seeds = range(SEEDS.value)
    question = (config, shape.name, chip.name, hardware.chips, hardware.tps, len(seeds))
    setting = msgspec.json.encode((*question, TOLERANCE.value)).decode()
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
    show(results)
    print(verdict(results, config))


def show(results: list[Result]) -> None:
    table = Table("candidate", "chips", "at best", "goodput", "95 %", "per chip", "not searched")
    for r in sorted(results, key=lambda r: r.per_chip, reverse=True):
        interval = "" if r.low is None or r.high is None else f"{r.low:.3g} to {r.high:.3g}"
        numbers = ("", "", "") if r.skipped else (f"{r.rate:.4g}", interval, f"{r.per_chip:.3g}")
        table.add_row(r.name, str(r.chips), f"{r.bound:.4g}", *numbers, r.skipped)
    Console().print(table)
    for r in results:
        if r.refusal:
            print(f"{r.name}: {r.refusal}")


if __name__ == "__main__":
    run_with_config(main)
