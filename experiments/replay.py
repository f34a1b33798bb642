"""Feed a run's recorded events to the policies again and check that every action is the same.

python -m experiments.replay --workdir=runs/quickstart/disaggregated
"""

from pathlib import Path

from absl import flags

from experiments.flags import run

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.", required=True)


def main() -> None:
    from pdjax.experiment import replay

    replay(Path(WORKDIR.value))


if __name__ == "__main__":
    run(main)
