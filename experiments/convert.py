"""Converts a model to a folder of its own, restored shard by shard straight onto a mesh.

    python -m experiments.convert --model smollm2 --out smollm2-bf16 --dtype bfloat16

About 15 seconds for SmolLM2 (135 M weights, 200 MB on disk in bfloat16). Converts any source that
`model.source` takes; the folder is such a source itself. The tokenizer goes with it.
"""

from absl import flags, logging

from experiments.flags import run
from pdjax.programs.weights import open_checkpoint, save_orbax
from pdjax.tokenizer import load_tokenizer

MODEL = flags.DEFINE_string("model", "smollm2", "The source (see pdjax.sources).")
OUT = flags.DEFINE_string("out", None, "The folder to write; it must be new.", required=True)
DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["float32", "bfloat16"], "Type of the weights.")


def main() -> None:
    logging.set_verbosity(logging.WARNING)  # orbax tells of every step
    tokenizer = load_tokenizer(MODEL.value)
    save_orbax(open_checkpoint(MODEL.value), OUT.value, DTYPE.value)
    tokenizer.save(OUT.value)
    print(f"wrote {OUT.value}")


if __name__ == "__main__":
    run(main)
