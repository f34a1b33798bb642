"""Our kernels beside those that JAX ships, by their compiled code or on a device.

    python -m experiments.bench_kernels --aot --json=bench_kernels_aot.json
    python -m experiments.bench_kernels --device --json=bench_kernels_device.json

--aot needs no accelerator, but the compilers of `make aot`: run it in that environment
(.venv-aot/bin/python). Every named shape is compiled for every chip. For TPU the rows are the
static schedule (see bench_kernels_tpu), with the goals of fewer bundles than the best of JAX's at
every decode shape and at most 1.05 of the bytes that must be moved; for GPU what ptxas reports (see
bench_kernels_gpu), with the goal of no spilled registers. Takes an hour or more for
everything on one core: choose with --chips and --match (--chips=v5e --match=decode_G takes about a
minute, --match=decode five). Interrupted, it keeps what it has. Only rows with a goal are printed;
the file has them all.

--device runs on the accelerator that is here, in under 4 minutes (see bench_kernels_device).
"""

import re
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import jax
from absl import flags
from tqdm import tqdm

from experiments.bench_common import JSON, Row, report
from experiments.flags import run
from kernels_pallas import aot_gpu, aot_tpu, cases
from kernels_pallas.specs import Spec
from pdjax.core.config import ConfigError

AOT = flags.DEFINE_boolean("aot", False, "Compile for chips that are not there.")
DEVICE = flags.DEFINE_boolean("device", False, "Time on the device that is here.")
CHIPS = flags.DEFINE_list("chips", [*aot_tpu.CHIPS, *aot_gpu.CHIPS], "Chips to compile for.")
MATCH = flags.DEFINE_string("match", "", "Only shapes with names that this expression matches.")


def main() -> None:
    if AOT.value == DEVICE.value:
        raise ConfigError("say what to run: either `--aot` or `--device`")
    setting: dict[str, object] = {name: version(name) for name in ("jax", "jaxlib")}
    if DEVICE.value:
        from experiments import bench_kernels_device

        setting["device"] = jax.devices()[0].device_kind
        report(bench_kernels_device.rows(jax.default_backend()), JSON.value, setting)
        return
    with tempfile.TemporaryDirectory() as folder:
        report(aot_rows(Path(folder)), JSON.value, setting, brief=True)


def aot_rows(dumps: Path) -> Iterator[Row]:
    """All chips that are asked for, at all shapes."""
    _start(dumps)
    specs = [(kind, s) for kind, all_ in cases.REAL.items() for s in all_ if _asked_for(s)]
    if not specs:
        raise ConfigError(f"`--match={MATCH.value}` matches no shape")
    for chip in CHIPS.value:
        for kind, spec in tqdm(specs, desc=chip, unit="shape"):
            yield from _rows(chip, kind, spec)


def _start(dumps: Path) -> None:
    for chips, compilers in ((aot_tpu.CHIPS, aot_tpu), (aot_gpu.CHIPS, aot_gpu)):
        if not set(chips) & set(CHIPS.value):
            continue
        if reason := compilers.missing():
            raise ConfigError(reason)
        folder = dumps / compilers.__name__
        folder.mkdir()
        compilers.start(folder)
    if unknown := set(CHIPS.value) - set(aot_tpu.CHIPS) - set(aot_gpu.CHIPS):
        raise ConfigError(
            f"`--chips` has {', '.join(sorted(unknown))}; there are "
            f"{', '.join([*aot_tpu.CHIPS, *aot_gpu.CHIPS])}"
        )


def _asked_for(spec: Spec) -> bool:
    return re.search(MATCH.value, spec.name) is not None


def _rows(chip: str, kind: str, spec: Spec) -> Iterator[Row]:
    # Not above: a compiler's environment need not have what the peers of the other import.
    if chip in aot_gpu.CHIPS:
        from experiments import bench_kernels_gpu as gpu

        yield from gpu.move_rows(chip, spec) if kind == "move" else gpu.rows(chip, spec, kind)
        return
    from experiments import bench_kernels_tpu as tpu

    if kind != "move":
        yield from (tpu.decode_rows if kind == "decode" else tpu.prefill_rows)(chip, spec)


if __name__ == "__main__":
    run(main)
