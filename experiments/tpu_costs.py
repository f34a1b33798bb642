"""What steps cost on TPUs that are not there, as a table for the simulator.

    python -m experiments.tpu_costs --model=llama3-8b --chip=v5e --tp=4 --json=llama3-8b-v5e-4.json

Compiles the engine's own programs for the chip, with our kernels inside (needs libtpu: run it in
the environment of `make aot`). experiments.tpu_step_costs says what a time is made of. Nothing here
is measured on a chip.

The file is what pdjax.costs.table reads: {model, chip, tp, rows}, a row for every phase
(`prefill`: size is the tokens of one chunk, context the tokens before it; `decode`: size is the
requests of a batch, context the keys that each sees), with `seconds`, and beside it the three parts
above. Takes about a minute per size on one core.
"""

import json
import tempfile
from pathlib import Path

from absl import flags
from tqdm import tqdm

from experiments.flags import run
from experiments.tpu_step_costs import rows_of, table_of
from kernels_pallas import aot_tpu
from pdjax.architecture import NAMED
from pdjax.core.config import ConfigError

MODEL = flags.DEFINE_enum("model", "llama3-8b", sorted(NAMED), "Architecture.")
CHIP = flags.DEFINE_enum("chip", "v5e", list(aot_tpu.CHIPS), "TPU generation.")
TP = flags.DEFINE_integer("tp", 1, "Chips that share the model.")
BATCHES = flags.DEFINE_list("batches", ["1", "8", "32", "128"], "Requests that decode together.")
CHUNKS = flags.DEFINE_list("chunks", ["128", "512", "2048"], "Prompt tokens of a prefill step.")
CONTEXTS = flags.DEFINE_list("contexts", ["1024", "4096", "16384"], "Tokens before a step.")
JSON = flags.DEFINE_string("json", None, "Where to write the table.")


def main() -> None:
    if reason := aot_tpu.missing():
        raise ConfigError(reason)
    contexts = [int(c) for c in CONTEXTS.value]
    sizes = [("decode", int(b)) for b in BATCHES.value] + [
        ("prefill", int(c)) for c in CHUNKS.value
    ]
    with tempfile.TemporaryDirectory() as folder:
        aot_tpu.start(Path(folder))
        rows = [
            row
            for size in tqdm(sizes, unit="size")
            for row in rows_of(NAMED[MODEL.value], CHIP.value, TP.value, *size, contexts)
        ]
    text = json.dumps(table_of(MODEL.value, CHIP.value, TP.value, rows), indent=1)
    if JSON.value:
        Path(JSON.value).write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    run(main)
