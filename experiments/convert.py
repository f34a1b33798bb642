"""Converts a model to a folder of its own, restored shard by shard straight onto a mesh.

    python -m experiments.convert --model smollm2 --out smollm2-bf16 --dtype bfloat16

Takes seconds for SmolLM2 (135 M weights, 270 MB in bfloat16). Any source that `model.source` takes
is converted; the folder is such a source itself. The tokenizer goes with it.
"""

from absl import app, flags

from pdjax.programs.weights import open_checkpoint, save_orbax
from pdjax.tokenizer import load_tokenizer

MODEL = flags.DEFINE_string("model", "smollm2", "the source (see pdjax.sources)")
OUT = flags.DEFINE_string("out", None, "the folder to write; it must be new", required=True)
DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["float32", "bfloat16"], "type of the weights")


def main(_) -> None:
    try:
        tokenizer = load_tokenizer(MODEL.value)
        save_orbax(open_checkpoint(MODEL.value), OUT.value, DTYPE.value)
        tokenizer.save(OUT.value)
    except ValueError as error:
        raise SystemExit(f"convert: {error}") from None
    print(f"wrote {OUT.value}")


if __name__ == "__main__":
    app.run(main)
