"""Feed a run's recorded events to the policies again and check that every action is the same.

    python -m experiments.replay --workdir=runs/quickstart/disaggregated

With --config (and --config.FIELD=VALUE) the events go to that config's policies instead of those
of the run: the first action that differs is where the two would have parted.
"""

from pathlib import Path

from experiments.flags import run_with_any_config
from pdjax.core.config import Config, ConfigError


def main(config: Config | None, workdir: Path | None) -> None:
    if workdir is None:
        raise ConfigError("no run given: add `--workdir=runs/quickstart/disaggregated`, or another")
    from pdjax.experiment import replay

    replay(workdir, config)


if __name__ == "__main__":
    run_with_any_config(main)
