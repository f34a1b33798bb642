"""Runs a config: one placement, all of them side by side, or a recorded run once more."""

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import msgspec
from tqdm import tqdm

import pdjax
from pdjax.chats import Requests, connect
from pdjax.core.config import Config, ConfigError, Transfer
from pdjax.core.events import Arrived, Finish, Hold, Record, Refuse, read_jsonl, write_line
from pdjax.core.loop import first_difference
from pdjax.core.loop import serve as serve_loop
from pdjax.core.scheduler import Scheduler
from pdjax.engine import Engine
from pdjax.metrics import Run, analyse
from pdjax.programs.weights import Checkpoint, open_checkpoint
from pdjax.report import comparison_table, write_comparison, write_run
from pdjax.tokenizer import Tokenizer, load_tokenizer
from pdjax.workload import Source, make_source

_PACKAGES = ("jax", "jaxlib", "flax", "numpy")


class Served(NamedTuple):
    """A placement's run and what each request got, by request id."""

    run: Run
    tokens: dict[int, tuple[int, ...]]


class Opened(NamedTuple):
    """What all placements of a config share."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    source: Source


def serve(config: Config, placement: str, workdir: Path) -> Run:
    """Serves the config's requests under one placement; the run's folder is `workdir`."""
    _require_placement(config, placement)
    served = _serve(config, placement, workdir, _open(config))
    print(comparison_table({placement: served.run}))
    print(f"{workdir / 'report.html'}")
    return served.run


def compare(config: Config, workdir: Path) -> dict[str, Run]:
    """Serves the same requests under every placement and writes the comparison.

    Interrupted (Ctrl-C), it still writes the comparison of the placements that are done. Raises
    TokensDiffer when two placements in float32 gave a request different tokens.
    """
    opened = _open(config)
    served: dict[str, Served] = {}
    try:
        for name in config.placements:
            served[name] = _serve(config, name, workdir / name, opened)
    except KeyboardInterrupt:
        if not served:
            raise
        print(f"interrupted: comparing {', '.join(served)}")
    runs = {name: one.run for name, one in served.items()}
    agreement = _agreement(config, served)
    page = write_comparison(workdir, config, environment(config) | {"tokens": agreement}, runs)
    print(comparison_table(runs))
    print(agreement)
    print(page)
    if config.model.dtype == "float32" and not agreement.startswith("all"):
        raise TokensDiffer(agreement)
    return runs


def sweep(
    config: Config, placement: str, transfers: Mapping[str, Transfer], workdir: Path
) -> Iterator[tuple[str, Run]]:
    """Serves the same requests with each of these, which differ in schedule and link only, on one
    engine. Yields each one's name and run; the run's folder has that name. A run that is there
    already is read.

    Raises ConfigError where a folder has a run of another config.
    """
    _require_placement(config, placement)
    opened = _open(config)
    engine: Engine | None = None
    warm: set[str] = set()
    for name, transfer in transfers.items():
        one = config.replace(transfer=transfer)
        if _is_finished(workdir / name, one, placement):
            records = list(read_jsonl(workdir / name / "events.jsonl"))
            yield name, analyse(records, config.placements[placement], config.slo)
            continue
        engine = engine or _engine(one, placement, opened)
        engine.config = one
        if transfer.schedule not in warm:
            _warm_up(engine, placement, opened)
            warm.add(transfer.schedule)
        yield name, _run(engine, placement, workdir / name, opened).run


def _is_finished(folder: Path, config: Config, placement: str) -> bool:
    """Whether the folder has this run, all of it: its outputs are written when it is over."""
    if not (folder / "outputs.jsonl").exists():
        return False
    text = (folder / "config.json").read_bytes()
    theirs = msgspec.json.decode(text, type=Config), msgspec.json.decode(text)["placement"]
    if theirs != (config, placement):
        raise ConfigError(
            f"`{folder}` has a run of another config: name another `--workdir`, or delete it"
        )
    return True


def replay(workdir: Path, config: Config | None = None) -> None:
    """Feeds a run's events to a fresh scheduler of the run's config, or of another one.

    Raises ReplayDiffers at the first action that is not as recorded.
    """
    try:
        text = (workdir / "config.json").read_bytes()
    except OSError as error:
        raise ConfigError(f"`{workdir}` is not a run's folder: {error}") from None
    placement = msgspec.json.decode(text).get("placement")
    if placement is None:
        raise ConfigError(f"`{workdir}` is a comparison: name the folder of one of its runs")
    config = config or msgspec.json.decode(text, type=Config)
    if placement not in config.placements:
        raise ConfigError(
            f"`{workdir}` is a run of `{placement}`; the config has {', '.join(config.placements)}"
        )
    records = list(read_jsonl(workdir / "events.jsonl"))
    difference = first_difference(records, _recorded_scheduler(config, placement, records))
    if difference:
        raise ReplayDiffers(f"{workdir}: {difference}")
    actions = sum(not record.is_event for record in records)
    print(f"{workdir}: {len(records) - actions} events give the same {actions} actions")


class TokensDiffer(ValueError):
    """Two placements gave a request different tokens."""


class ReplayDiffers(ValueError):
    """A log whose events give other actions than those it records."""


def environment(config: Config) -> dict[str, object]:
    """What a reader needs to run this again: versions, devices, seed, commit."""
    devices = jax.devices()
    return {
        "pdjax": pdjax.__version__,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
        "devices": f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "seed": config.seed,
        "commit": _commit(),
    }


# --- one placement -----------------------------------------------------------------------


def _require_placement(config: Config, placement: str) -> None:
    if placement not in config.placements:
        raise ConfigError(
            f"`--placement={placement}`: the config has {', '.join(config.placements)}"
        )


def _open(config: Config) -> Opened:
    checkpoint = open_checkpoint(config.model.source)
    tokenizer = load_tokenizer(config.model.source)
    source = make_source(
        config.workload,
        config.seed,
        encode=tokenizer.encode,
        vocab=checkpoint.arch.V,
        context=config.model.context,
        eos=tokenizer.eos,
        chat=lambda text: tokenizer.chat([{"role": "user", "content": text}]),
    )
    return Opened(checkpoint, tokenizer, source)


def _serve(config: Config, placement: str, folder: Path, opened: Opened) -> Served:
    engine = _engine(config, placement, opened)
    _warm_up(engine, placement, opened)
    return _run(engine, placement, folder, opened)


def _engine(config: Config, placement: str, opened: Opened) -> Engine:
    return Engine(config, placement, opened.checkpoint, decode=opened.tokenizer.decode)


def _connected(engine: Engine, opened: Opened) -> Requests:
    return connect(opened.source, engine.config, lambda rid: engine.texts[rid].tokens)


def _warm_up(engine: Engine, placement: str, opened: Opened) -> None:
    warm_ups = list(engine.warm_ups(_connected(engine, opened).longest))
    for warm_up in tqdm(warm_ups, desc=f"{placement}: compiling", unit="program"):
        warm_up()


def _run(engine: Engine, placement: str, folder: Path, opened: Opened) -> Served:
    config, source = engine.config, _connected(engine, opened)
    folder.mkdir(parents=True, exist_ok=True)
    backend = engine.backend()
    loop = serve_loop(source, backend, engine.scheduler())
    progress = tqdm(total=len(source.longest), desc=f"{placement}: serving", unit="request")
    records: list[Record] = []
    try:
        records.extend(_logged(loop, folder / "events.jsonl", progress))
    except KeyboardInterrupt:
        if records:
            write_run(folder, config, placement, environment(config), records)
            print(f"interrupted: what was seen until now is in {folder / 'report.html'}")
        raise
    finally:
        backend.close()
    arrived = [record.body.request.id for record in records if isinstance(record.body, Arrived)]
    tokens = {rid: tuple(engine.texts[rid].tokens) for rid in sorted(arrived)}
    _write_outputs(folder / "outputs.jsonl", tokens, opened.tokenizer)
    run = write_run(folder, config, placement, environment(config), records)
    return Served(run, tokens)


def _logged(records: Iterator[Record], path: Path, progress: tqdm) -> Iterator[Record]:
    """Writes records as they come, so that an interrupted run keeps what it has seen."""
    with open(path, "wb") as log, progress:
        for record in records:
            log.write(write_line(record))
            if isinstance(record.body, Finish | Refuse):
                progress.update()
            yield record


def _write_outputs(path: Path, tokens: dict[int, tuple[int, ...]], tokenizer: Tokenizer) -> None:
    with open(path, "wb") as file:
        for rid, ids in tokens.items():
            line = {"rid": rid, "tokens": ids, "text": tokenizer.decode(ids)}
            file.write(msgspec.json.encode(line) + b"\n")


def _ended(run: Run) -> set[int]:
    """Requests whose text is whole."""
    return set(run.requests.query("completed").index)


def _agreement(config: Config, served: dict[str, Served]) -> str:
    """One line: whether every request that was served everywhere got the same tokens there."""
    first, *others = served
    ended = set.intersection(*(_ended(one.run) for one in served.values()))
    requests = {rid: ids for rid, ids in served[first].tokens.items() if rid in ended}
    for other in others:
        differ = [rid for rid, ids in requests.items() if served[other].tokens[rid] != ids]
        if differ:
            return (
                f"{len(differ)} of {len(requests)} requests got other tokens from `{other}` than "
                f"from `{first}` in {config.model.dtype}; the first is request {differ[0]}"
            )
    count = sum(map(len, requests.values()))
    return f"all {len(served)} placements gave the same {count} tokens to {len(requests)} requests"


def _recorded_scheduler(config: Config, placement: str, records: Sequence[Record]) -> Scheduler:
    """The scheduler of a recorded run; its pools' layouts are in the log."""
    holds = [record.body.handle for record in records if isinstance(record.body, Hold)]
    layouts = {handle.pool: handle.layout for handle in holds}
    return Scheduler.of(config, placement, layouts=layouts)


def _commit() -> str:
    here = Path(__file__).parent
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "not a git checkout"
    return said.stdout.strip()
