"""Serve the requests of a config under one of its placements.

python -m experiments.serve --config=configs/quickstart.py --placement=disaggregated
"""

from pathlib import Path

from absl import flags

from experiments.flags import run_with_config, setup_devices
from pdjax.core.config import Config

PLACEMENT = flags.DEFINE_string("placement", None, "One of the config's placements.", required=True)


def main(config: Config, workdir: Path) -> None:
    setup_devices()
    from pdjax.experiment import serve

    serve(config, PLACEMENT.value, workdir)


if __name__ == "__main__":
    run_with_config(main)
