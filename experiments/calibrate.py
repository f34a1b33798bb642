"""How long do steps of the live engine take on this machine? Measures them and fits a roofline.

    python -m experiments.calibrate --config=configs/quickstart.py --placement=collocated \
        --json=calibration.json

One collocated instance with the placement's chunk, slots and model serves prompts of many lengths,
one after the other, and batches of many sizes and contexts. Of every shape of step the median
time counts. Every other shape is fitted, the rest are held out: their errors, with their sign, are
what a simulation may expect. The file has the roofline (`pdjax.costs.roofline.read_roofline` reads
it) with the sizes that it was fitted on, the errors, all samples and the environment. Takes about
10 minutes on 2 cores. Close other programs first: what they disturb does not fit any formula.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
from absl import flags
from tqdm import tqdm

from experiments.bench_common import JSON, Row, report
from experiments.flags import run_with_config, setup_devices
from pdjax.calibration import VALUE_BYTES, roofline_of
from pdjax.catalogue import Shape, shape_of
from pdjax.core.config import Cache, Clock, Config, ConfigError, Pool, Role
from pdjax.core.loop import serve
from pdjax.core.request import Request, SamplingParams
from pdjax.costs.recorded import Sample, medians_of, samples_of
from pdjax.costs.roofline import Roofline
from pdjax.engine import Engine
from pdjax.experiment import environment
from pdjax.programs.weights import open_checkpoint
from pdjax.workload import Source

PLACEMENT = flags.DEFINE_string("placement", "collocated", "One of the config's placements.")
REPEATS = flags.DEFINE_integer("repeats", 3, "Rounds over all loads.")
OUTPUTS = flags.DEFINE_integer("outputs", 8, "Tokens per request of a batch.")

SHORTEST = 16  # tokens of a prompt


def main(config: Config, workdir: Path) -> None:
    del workdir  # one file is all that comes out
    setup_devices()
    config = one_instance(config, PLACEMENT.value)
    role = config.placements["calibrate"]["server"]
    engine = Engine(config, "calibrate", open_checkpoint(config.model.source))
    shape = shape_of(engine.arch, f"calibrated from {config.model.source}")
    samples = [sample for _, sample in sorted(medians_of(measure(engine, role)).items())]
    name = f"{config.model.source} on this machine"
    value_bytes = VALUE_BYTES[config.model.dtype]
    line = roofline_of(role, shape, samples[::2], name=name, value_bytes=value_bytes)
    rows = list(rows_of(line, shape, samples[1::2]))
    report(rows, None, {})
    print(f"fitted to {len(samples[::2])} shapes: {line.coefficients}")
    path = Path(JSON.value or "calibration.json")
    write(path, line, rows, samples, environment(config))
    print(path)


def one_instance(config: Config, placement: str) -> Config:
    """A config of one instance that does what the placement's instances do, with memory for all
    its slots. Raises ConfigError where prefill and decode have different tp."""
    if placement not in config.placements:
        raise ConfigError(f"`--placement={placement}`: the config has {list(config.placements)}")
    roles = config.placements[placement].values()
    prefill = next(role for role in roles if role.prefills_here)
    decode = next(role for role in roles if role.decodes_here)
    if prefill.tp != decode.tp:
        raise ConfigError(
            f"`{placement}` prefills with tp {prefill.tp} and decodes with tp {decode.tp}: "
            "calibrate a placement for each"
        )
    page = decode.pool.page_size
    tokens = (decode.slots + 1) * -(-config.model.context // page) * page
    role = replace(
        decode,
        does="both",
        instances=1,
        beside="",
        pool_of="",
        pool=Pool(tokens=tokens, page_size=page),
        chunk=prefill.chunk,
        prefills=1,
        growth=0,
        preempt="recompute",
    )
    placements = {"calibrate": {"server": role}}
    return config.replace(placements=placements, cache=Cache(), faults=(), clock=Clock())


# --- Measuring -----------------------------------------------------------------------------


def measure(engine: Engine, role: Role) -> Iterator[Sample]:
    """Every step of all loads, after the programs are compiled."""
    context, vocab = engine.config.model.context, engine.arch.V
    # Round after round, so that a disturbance does not hit all of one shape.
    every = list(loads(context, role.slots, OUTPUTS.value)) * REPEATS.value
    warm_ups = list(engine.warm_ups([prompt for load in every for prompt, _ in load]))
    for warm_up in tqdm(warm_ups, desc="compiling", unit="program"):
        warm_up()
    for load in tqdm(every, desc="measuring", unit="load"):
        requests = tuple(_request(i, *size, vocab) for i, size in enumerate(load))
        backend = engine.live()
        try:
            yield from samples_of(list(serve(Source(requests), backend, engine.scheduler())))
        finally:
            backend.close()


def loads(context: int, slots: int, outputs: int) -> Iterator[list[tuple[int, int]]]:
    """(prompt, output) lengths of requests that come at once: prompts alone, of many lengths; then
    batches of every size at every context."""
    yield [(prompt, 1) for prompt in _grid(SHORTEST, context - 1, 2)]
    sizes = [n for n in (2**i for i in range(slots.bit_length())) if n < slots]
    for prompt in _grid(SHORTEST, context - outputs, 1):
        for n in (*sizes, slots):
            yield [(prompt, outputs)] * n


def _grid(low: int, high: int, per_octave: int) -> list[int]:
    """Lengths from low to high, so many per doubling."""
    points = int(np.log2(high / low) * per_octave) + 1
    lengths = {round(low * 2 ** (i / per_octave)) for i in range(points)}
    return sorted(lengths | {high})


def _request(id: int, prompt: int, output: int, vocab: int) -> Request:
    tokens = np.random.default_rng(id).integers(0, vocab, prompt).tolist()
    return Request(id, 0, prompt, SamplingParams(output), prompt=tuple(tokens))


# --- Fitting -------------------------------------------------------------------------------


def rows_of(line: Roofline, shape: Shape, samples: Sequence[Sample]) -> Iterator[Row]:
    """How far the roofline is from these samples, in per cent of what was measured."""
    errors: dict[str, list[float]] = {"prefill": [], "decode": [], "mixed": [], "all": []}
    for batch, seconds in samples:
        error = 100 * (line.seconds(shape, batch) / seconds - 1)
        kind = (
            "mixed" if batch.chunks and batch.decodes else "decode" if batch.decodes else "prefill"
        )
        errors[kind].append(error)
        errors["all"].append(error)
    for kind, found in errors.items():
        if not found:
            continue
        goals = ("<= 5", "<= 10") if kind == "all" else ("", "")
        off = np.abs(found)
        yield Row(f"{kind}: held-out shapes", len(found), "")
        yield Row(f"{kind}: mean absolute error", float(off.mean()), "%", goals[0])
        yield Row(f"{kind}: 95th percentile of it", float(np.quantile(off, 0.95)), "%", goals[1])
        yield Row(f"{kind}: bias", float(np.mean(found)), "%")


def write(
    path: Path, line: Roofline, rows: Sequence[Row], samples: Sequence[Sample], setting: object
) -> None:
    listed = [{**row._asdict(), "met": row.met} for row in rows]
    meets = all(row.met is not False for row in rows)
    measured = [{**batch._asdict(), "seconds": seconds} for batch, seconds in samples]
    content = {
        "meets_goals": meets, "setting": setting, "rows": listed, "roofline": line,
        "samples": measured,
    }  # fmt: skip
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1))


if __name__ == "__main__":
    run_with_config(main)
