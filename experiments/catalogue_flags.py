"""Flags of the experiments that simulate a catalogue model on a catalogue chip."""

from absl import flags

MODEL = flags.DEFINE_string("model", "llama3-8b", "A model of the catalogue.")
CHIP = flags.DEFINE_string("chip", "h100", "A chip of the catalogue.")
SEEDS = flags.DEFINE_integer("seeds", 3, "Seeds that everything is served under.", 1)
