"""Serve the same requests under every placement of a config and compare what clients see.

python -m experiments.compare --config=configs/quickstart.py
"""

from pathlib import Path

from experiments.flags import run_with_config, setup_devices
from pdjax.core.config import Config


def main(config: Config, workdir: Path) -> None:
    setup_devices()
    from pdjax.experiment import compare

    compare(config, workdir)


if __name__ == "__main__":
    run_with_config(main)
