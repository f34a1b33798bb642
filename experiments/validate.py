"""How well does the simulator foretell the live engine, on loads that it has not seen?

    python -m experiments.validate --config=configs/validation.py --json=FILE

Every placement of the config serves loads live, in rounds: one at a lower rate with longer texts,
the config's own workload, one at a higher rate with shorter texts. A roofline per role, and the
speed of steps that run together on one processor, are fitted to the first and the last of each
round; the second ones are simulated, from their seeds alone, and compared with what was measured.
All devices of a CPU are one processor.

The goals are on mean TPOT and E2E (5 %), mean TTFT (10 %), their p99 (15 %), and step times (5 %),
where the median of each shape of step counts. `noise` says how far single steps of one shape are
from their median, `drift` how much the machine's speed differs between loads: neither can be
foretold, and a goal below the drift asks for a quieter machine. Signed errors are positive where
the simulator is too slow. Logs stay in the results' folder, and what is there is not served again.

Takes 3 minutes a round on 2 cores. Close other programs first.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from absl import flags
from matplotlib.figure import Figure
from tqdm import tqdm

from experiments.bench_common import JSON, Row, report
from experiments.flags import run_with_config, setup_devices
from pdjax.architecture import Architecture
from pdjax.calibration import VALUE_BYTES, Calibration, Slowed, calibrate, error_of, slowed_of
from pdjax.catalogue import Shape, shape_of
from pdjax.core.config import Config, Link
from pdjax.core.events import Record, read_jsonl, write_jsonl
from pdjax.core.loop import serve
from pdjax.costs.recorded import shape_key, timed_of
from pdjax.engine import Engine
from pdjax.experiment import environment
from pdjax.metrics import analyse
from pdjax.processors import shared_processors
from pdjax.programs.weights import open_checkpoint
from pdjax.report_style import STYLE
from pdjax.sim import simulate
from pdjax.workload import Source, make_source

ROUNDS = flags.DEFINE_integer("rounds", 3, "Rounds over the loads.", 1)

FITTED = {"slow": (0.7, 1.3), "fast": (1.3, 0.7)}
"""Loads that costs are fitted to: factors of the workload's rate and of its lengths."""
FORETOLD = {"same": (1.0, 1.0)}
TIMES = {"ttft_s": ("TTFT", 10), "tpot_s": ("TPOT", 5), "e2e_s": ("E2E", 5)}
"""Columns of a run's requests: name, and how many per cent their mean may be off."""
P99_OFF = 15
OFTEN = 3
"""Steps of a shape from which on it has a median."""


class Found(NamedTuple):
    """Of one placement: what was fitted, how far the mean step of each load is from it, relatively,
    and the steps and requests of all foretold loads."""

    calibration: Calibration
    loads: list[float]
    steps: list[Slowed]
    live: pd.DataFrame
    simulated: pd.DataFrame


def main(config: Config, workdir: Path) -> None:
    setup_devices()
    rows: list[Row] = []
    found: dict[str, Found] = {}
    for name in config.placements:
        arch = serve_all(config, name, workdir / name)
        found[name] = foretell(config, name, workdir / name, arch)
        rows += rows_of(name, found[name], shape_of(arch, config.model.source))
    report(rows, JSON.value, {"environment": environment(config), "rounds": ROUNDS.value})
    figure = workdir / "validation.svg"
    draw(found).savefig(figure)
    print(figure)


# --- Loads -----------------------------------------------------------------------------------


def loads() -> Iterator[tuple[str, tuple[float, float], int]]:
    """(name, factors, seed) in the order in which they are served: what is foretold lies between
    what is fitted, so that a machine that gets slower does so for both."""
    order = (("slow", FITTED["slow"]), ("same", FORETOLD["same"]), ("fast", FITTED["fast"]))
    for number in range(ROUNDS.value):
        for i, (name, factors) in enumerate(order):
            yield f"{name}-{number}", factors, len(order) * number + i


def source_of(config: Config, factors: tuple[float, float], seed: int, vocab: int) -> Source:
    """The config's workload with these factors; random tokens."""
    rate, length = factors
    load = config.workload
    load = replace(
        load,
        arrivals=replace(load.arrivals, rate=load.arrivals.rate * rate),
        prompt=replace(load.prompt, mean=load.prompt.mean * length),
        output=replace(load.output, mean=load.output.mean * length),
        text="random",
    )
    context = config.model.context
    seeded = config.seed + seed
    return make_source(load, seeded, encode=lambda text: [], vocab=vocab, context=context, eos=())


def serve_all(config: Config, placement: str, folder: Path) -> Architecture:
    """Serves the loads that have no log yet."""
    checkpoint = open_checkpoint(config.model.source)
    folder.mkdir(parents=True, exist_ok=True)
    missing = [load for load in loads() if not _log(folder, load[0]).exists()]
    if not missing:
        return checkpoint.arch
    engine = Engine(config, placement, checkpoint)
    lengths = range(config.workload.prompt.low, config.workload.prompt.high + 1)
    for warm_up in tqdm(list(engine.warm_ups(lengths)), desc=f"{placement}: compiling"):
        warm_up()
    for name, factors, seed in tqdm(missing, desc=f"{placement}: serving", unit="load"):
        source = source_of(config, factors, seed, checkpoint.arch.V)
        backend = engine.live()
        try:
            records = list(serve(source, backend, engine.scheduler()))
        finally:
            backend.close()
        half_written = folder / "half-written"
        write_jsonl(half_written, records)
        half_written.rename(_log(folder, name))
    return checkpoint.arch


def _log(folder: Path, load: str) -> Path:
    return folder / f"{load}.jsonl"


# --- Foretelling ------------------------------------------------------------------------------


def foretell(config: Config, placement: str, folder: Path, arch: Architecture) -> Found:
    """Fits the costs and simulates what they were not fitted to."""
    roles, shape = config.placements[placement], shape_of(arch, config.model.source)
    logs = {load[0]: list(read_jsonl(_log(folder, load[0]))) for load in loads()}
    fitted = [logs[name] for name in logs if name.split("-")[0] in FITTED]
    value_bytes = VALUE_BYTES[config.model.dtype]
    calibration = calibrate(fitted, roles, shape, value_bytes=value_bytes, host=True)
    cost = calibration.cost(shape, Link())
    processors = shared_processors(roles, host=True)
    live, simulated, steps, means = [], [], [], []
    for name, factors, seed in loads():
        slowed = slowed_of(timed_of(logs[name]), processors)
        means.append(float(np.mean([error_of(it, calibration, shape) for it in slowed])))
        if name.split("-")[0] in FITTED:
            continue
        steps += slowed
        source = source_of(config, factors, seed, arch.V)
        live.append(_requests(config, placement, logs[name]))
        simulated.append(
            _requests(config, placement, list(simulate(config, placement, source, cost)))
        )
    return Found(calibration, means, steps, pd.concat(live), pd.concat(simulated))


def _requests(config: Config, placement: str, records: Sequence[Record]) -> pd.DataFrame:
    return analyse(records, config.placements[placement], config.slo).requests


# --- Comparing --------------------------------------------------------------------------------


def rows_of(placement: str, found: Found, shape: Shape) -> Iterator[Row]:
    if len(found.calibration.lines) > 1:
        speed = found.calibration.sharing.speed
        yield Row(f"{placement}: speed of each of two steps that run together", speed, "")
    yield from _step_rows(placement, found, shape)
    for column, (name, off) in TIMES.items():
        live, simulated = (it[column].dropna().to_numpy() for it in (found.live, found.simulated))
        yield from _error(f"{placement}: mean {name}", live.mean(), simulated.mean(), off)
        live, simulated = (float(np.quantile(times, 0.99)) for times in (live, simulated))
        yield from _error(f"{placement}: p99 {name}", live, simulated, P99_OFF)


def _error(what: str, live: float, simulated: float, off: float) -> Iterator[Row]:
    signed = float(100 * (simulated / live - 1))
    yield Row(f"{what}, live", float(live), "s")
    yield Row(f"{what}, signed error", signed, "%")
    yield Row(f"{what}, error", abs(signed), "%", f"<= {off}")


def _step_rows(placement: str, found: Found, shape: Shape) -> Iterator[Row]:
    calibration = found.calibration
    steps = pd.DataFrame(
        {
            "shape": [(it.step.instance, shape_key(it.step.batch)) for it in found.steps],
            "alone": [it.alone_s(calibration.sharing) for it in found.steps],
            "error": [100 * error_of(it, calibration, shape) for it in found.steps],
        }
    )
    steps["foretold"] = steps.alone * (1 + steps.error / 100)
    shapes = steps.groupby("shape")
    median = shapes.alone.transform("median")
    often = shapes.alone.transform("size") >= OFTEN
    noise = (steps.alone / median - 1)[often]
    of_shape = (shapes.foretold.mean() / shapes.alone.median() - 1)[shapes.size() >= OFTEN]
    yield Row(f"{placement}: steps", len(steps), "")
    drift = 100 * float(np.std(found.loads, ddof=1))
    yield Row(f"{placement}: drift of the machine between loads, standard deviation", drift, "%")
    yield Row(f"{placement}: noise of a step's time", 100 * noise.abs().mean(), "%")
    yield Row(f"{placement}: a step's time, mean absolute error", steps.error.abs().mean(), "%")
    yield Row(f"{placement}: a step's time, signed error", steps.error.mean(), "%")
    error = float(100 * of_shape.abs().mean())
    yield Row(f"{placement}: a shape's median time, mean absolute error", error, "%", "<= 5")


def draw(found: Mapping[str, Found]) -> Figure:
    """How times are distributed, live and simulated: a row of panels for each placement."""
    with matplotlib.rc_context(STYLE):  # pyright: ignore[reportArgumentType]
        figure = Figure(figsize=(8, 2.2 * len(found)))
        panels = figure.subplots(len(found), len(TIMES), squeeze=False)
        for axes, (placement, one) in zip(panels, found.items(), strict=True):
            for ax, (column, (name, _)) in zip(axes, TIMES.items(), strict=True):
                ax.ecdf(one.live[column].dropna(), label="live", color="#000000")
                ax.ecdf(one.simulated[column].dropna(), label="simulated", color="#D55E00", ls="--")
                ax.set(title=f"{placement}: {name}", xlabel="s", xlim=(0, None))
            axes[0].set_ylabel("share of requests")
        panels[0][0].legend(loc="lower right")
        return figure


if __name__ == "__main__":
    run_with_config(main)
