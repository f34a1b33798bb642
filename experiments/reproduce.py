"""What papers published, and what comes out here: side by side, with a verdict for each number.

    python -m experiments.reproduce --config=configs/papers/mooncake_fig9.py
    python -m experiments.reproduce --all

A config's docstring says what is reproduced, with which stand-ins, what cannot be, and how long
it takes. Its rows are printed and written, with its figure, to runs/papers/NAME; with --all every
config of configs/papers is run (about half an hour of one core) and runs/papers/index.html shows
all that are done, from the first on. A result that is there is kept (interrupt and go on as you
like) unless --again is given. Nothing here needs a device.
Traces are read from `PDJAX_TRACES`, or from ../shared/traces.
"""

import runpy
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from absl import flags

from experiments.flags import run
from pdjax.core.config import ConfigError
from pdjax.reproduce import Reproduction
from pdjax.reproduce.pages import Result, read, table, write, write_page

CONFIG = flags.DEFINE_string("config", None, "A file of configs/papers.")
ALL = flags.DEFINE_bool("all", False, "Every file of configs/papers.")
AGAIN = flags.DEFINE_bool("again", False, "Also what has a result already.")
WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder for results (default: runs/papers); each has one below."
)

PAPERS = Path("configs/papers")


def reproduce_all(paths: Sequence[Path], workdir: Path, again: bool) -> list[Result]:
    """Reproduces each config, prints its rows, and writes the page of all that are done after each:
    an interrupt (Ctrl-C) loses no more than the config at hand."""
    page, results = workdir / "index.html", []
    try:
        for number, path in enumerate(paths, 1):
            print(f"[{number}/{len(paths)}] {path.stem}", flush=True)
            results.append(_kept(path, workdir, again) or one(path, workdir))
            print(table(results[-1]), flush=True)
            write_page(page, "Reproductions", results, planned=len(paths))
    except KeyboardInterrupt:
        print(f"interrupted: the page has {len(results)} of {len(paths)}; the others can follow")
    print(page)
    return results


def _kept(path: Path, workdir: Path, again: bool) -> Result | None:
    kept = None if again else read(workdir / path.stem)
    if kept is not None:
        print(f"{path.stem}: kept from {kept.commit}; --again runs it once more")
    return kept


def one(path: Path, workdir: Path) -> Result:
    """Reproduces one config. An error of pdjax (a trace that is missing) is its result."""
    about, reproduce = load(path)
    began_s = time.process_time()
    try:
        found = reproduce()
    except ValueError as error:
        if not type(error).__module__.startswith("pdjax."):
            raise
        return Result(name=path.stem, about=about, why_not=str(error))
    seconds = time.process_time() - began_s
    result = Result(
        name=path.stem, about=about, seconds=seconds, commit=_commit(), reproduction=found
    )
    write(workdir / path.stem, result)
    return result


def load(path: Path) -> tuple[str, Callable[[], Reproduction]]:
    """(docstring, function) of a config file. Raises ConfigError where it has no such function."""
    if not path.is_file():
        raise ConfigError(f"`--config={path}` is not a file; {PAPERS} has {', '.join(_names())}")
    names = runpy.run_path(str(path))
    if "reproduce" not in names:
        raise ConfigError(f"`{path}` has no `reproduce()`: give one of {PAPERS}")
    return (names["__doc__"] or "").strip(), names["reproduce"]


def _names() -> list[str]:
    return sorted(path.stem for path in PAPERS.glob("*.py") if path.stem != "__init__")


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    return said.stdout.strip() or "not a git checkout"


def main() -> None:
    workdir = Path(WORKDIR.value or "runs/papers")
    if ALL.value:
        reproduce_all([PAPERS / f"{name}.py" for name in _names()], workdir, AGAIN.value)
    elif CONFIG.value:
        _reproduce_one(Path(CONFIG.value), workdir)
    else:
        raise ConfigError("give `--config=configs/papers/NAME.py`, or `--all`")


def _reproduce_one(path: Path, workdir: Path) -> None:
    result = one(path, workdir)
    if result.reproduction is None:
        raise ConfigError(result.why_not)
    print(table(result))
    print(write_page(workdir / result.name / "index.html", result.name, [result]))


if __name__ == "__main__":
    run(main)
