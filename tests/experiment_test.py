"""A config run from end to end: what is written, what is said, and what an interruption leaves."""

import contextlib
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from engine_helpers import COLLOCATED, CONTEXT, LAYERS, SPLIT

from pdjax import experiment
from pdjax.core.config import (
    Arrivals,
    Clock,
    Config,
    ConfigError,
    Lengths,
    Model,
    Transfer,
    Workload,
)
from pdjax.core.events import Arrived, Finish, Record, read_jsonl, write_jsonl
from pdjax.engine import Engine
from pdjax.experiment import ReplayDiffers, TokensDiffer, compare, replay, serve

CONFIG = Config(
    placements={"collocated": COLLOCATED, "split": SPLIT},
    name="small",
    model=Model("random:tiny", context=CONTEXT),
    transfer=Transfer(groups=LAYERS),
    workload=Workload(
        requests=8,
        arrivals=Arrivals(rate=50),
        prompt=Lengths(mean=16),
        output=Lengths("lognormal", mean=4, low=1, high=12),
        text="random",
        temperature=0.8,
        top_k=40,
    ),
    clock=Clock("modelled"),
)
RUN_FILES = {
    "config.json", "environment.json", "events.jsonl", "figures", "outputs.jsonl", "report.html",
    "requests.csv", "summary.json", "timeline.json",
}  # fmt: skip
COMPARISON_FILES = {
    "config.json", "environment.json", "comparison.csv", "comparison.html", "figures",
}  # fmt: skip


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def outputs(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "outputs.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> Path:
    """The folder of one comparison, for tests that only look; what it printed lies beside it."""
    folder = tmp_path_factory.mktemp("compared") / "it"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runs = compare(CONFIG, folder)
    assert list(runs) == list(CONFIG.placements)
    (folder.parent / "said").write_text(said.getvalue())
    return folder


def test_compare_writes_the_comparison_and_every_run(compared):
    assert names(compared) == COMPARISON_FILES | set(CONFIG.placements)
    for name in CONFIG.placements:
        assert names(compared / name) == RUN_FILES
        config = json.loads((compared / name / "config.json").read_text())
        assert config.pop("placement") == name
        assert msgspec.convert(config, Config) == CONFIG
    environment = json.loads((compared / "environment.json").read_text())
    assert environment["seed"] == CONFIG.seed and environment["devices"].startswith("8 x cpu")
    assert environment["tokens"].startswith("all 2 placements gave the same ")


def test_every_placement_got_the_same_requests_and_gave_the_same_tokens(compared):
    ours, theirs = (outputs(compared / name) for name in CONFIG.placements)
    assert ours == theirs
    assert [line["rid"] for line in ours] == list(range(8))
    finished = {}
    for name in CONFIG.placements:
        records = list(read_jsonl(compared / name / "events.jsonl"))
        ends = [r.body for r in records if isinstance(r.body, Finish)]
        finished[name] = {end.rid: end.tokens for end in ends}
    assert finished["split"] == {line["rid"]: len(line["tokens"]) for line in ours}
    assert finished["split"] == finished["collocated"]


def test_compare_says_a_table_the_agreement_and_the_page(compared):
    said = (compared.parent / "said").read_text().splitlines()
    rows = [words[0] for line in said if (words := line.split())]
    assert [name for name in rows if name in CONFIG.placements] == ["collocated", "split"]
    total = sum(len(line["tokens"]) for line in outputs(compared / "split"))
    assert said[-2] == f"all 2 placements gave the same {total} tokens to 8 requests"
    assert said[-1] == str(compared / "comparison.html")


def test_serving_again_gives_the_same_log_on_the_modelled_clock(compared, tmp_path, capsys):
    serve(CONFIG, "split", tmp_path)
    again, before = tmp_path / "events.jsonl", compared / "split" / "events.jsonl"
    assert again.read_bytes() == before.read_bytes()
    assert names(tmp_path) == RUN_FILES
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "report.html")


def test_a_placement_that_the_config_lacks_is_told_with_those_it_has(tmp_path):
    with pytest.raises(ConfigError, match=r"`--placement=spilt`: the config has collocated, split"):
        serve(CONFIG, "spilt", tmp_path)


# --- Replay ------------------------------------------------------------------------------


def test_a_run_on_the_wall_clock_replays_from_its_folder(tmp_path, capsys):
    serve(CONFIG.replace(clock=Clock("wall")), "split", tmp_path)
    capsys.readouterr()
    replay(tmp_path)
    log = list(read_jsonl(tmp_path / "events.jsonl"))
    events = sum(record.is_event for record in log)
    said = f"{tmp_path}: {events} events give the same {len(log) - events} actions\n"
    assert capsys.readouterr().out == said


def test_a_log_that_was_changed_does_not_replay(compared, tmp_path):
    log = list(read_jsonl(compared / "split" / "events.jsonl"))
    at = next(i for i, record in enumerate(log) if isinstance(record.body, Finish))
    other = msgspec.structs.replace(log[at].body, tokens=log[at].body.tokens + 1)
    write_jsonl(tmp_path / "events.jsonl", [*log[:at], Record(log[at].t_ns, other), *log[at + 1 :]])
    (tmp_path / "config.json").write_bytes((compared / "split" / "config.json").read_bytes())
    with pytest.raises(ReplayDiffers, match=f"record {at + 1}: the log has Finish"):
        replay(tmp_path)


def test_a_log_under_another_config_parts_at_the_first_other_action(compared):
    replay(compared / "split", CONFIG)
    with pytest.raises(ReplayDiffers, match=r"record \d+: the log has Step"):
        replay(compared / "split", CONFIG.replace(transfer=Transfer(groups=1)))
    alone = CONFIG.replace(placements={"collocated": COLLOCATED})
    with pytest.raises(ConfigError, match="is a run of `split`; the config has collocated"):
        replay(compared / "split", alone)


def test_a_folder_that_is_no_run_is_told(compared, tmp_path):
    with pytest.raises(ConfigError, match="is not a run's folder"):
        replay(tmp_path)
    with pytest.raises(ConfigError, match="is a comparison: name the folder of one of its runs"):
        replay(compared)


# --- What goes wrong ---------------------------------------------------------------------


def interrupted(placement: str, after: int):
    """The loop, but Ctrl-C comes after so many records of that placement."""

    def loop(source, backend, scheduler) -> Iterator[Record]:
        records = real(source, backend, scheduler)
        if set(scheduler.instances) == {f"{role}/0" for role in CONFIG.placements[placement]}:
            for _ in range(after):
                yield next(records)
            raise KeyboardInterrupt
        yield from records

    real = experiment.serve_loop
    return loop


def test_an_interrupted_comparison_keeps_what_is_done_and_the_log_so_far(
    compared, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(experiment, "serve_loop", interrupted("split", after=30))
    runs = compare(CONFIG, tmp_path)
    assert list(runs) == ["collocated"]
    assert names(tmp_path) == COMPARISON_FILES | {"collocated", "split"}
    assert names(tmp_path / "collocated") == RUN_FILES
    whole = (compared / "split" / "events.jsonl").read_bytes().splitlines()
    assert (tmp_path / "split" / "events.jsonl").read_bytes().splitlines() == whole[:30]
    assert names(tmp_path / "split") == RUN_FILES - {"outputs.jsonl"}
    assert "interrupted: comparing collocated" in capsys.readouterr().out


def test_an_interruption_before_anything_is_done_is_passed_on(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "serve_loop", interrupted("collocated", after=5))
    with pytest.raises(KeyboardInterrupt):
        compare(CONFIG, tmp_path)
    assert not (tmp_path / "comparison.html").exists()
    assert len(list(read_jsonl(tmp_path / "collocated" / "events.jsonl"))) == 5


class Astray(Engine):
    """Where it is split, it takes request 5 for another one."""

    def note(self, message) -> None:
        if isinstance(message, Arrived) and message.request.id == 5 and "decode" in self.placement:
            prompt = (*message.request.prompt[:-1], 255 - message.request.prompt[-1])
            message = Arrived(msgspec.structs.replace(message.request, prompt=prompt))
        super().note(message)


def test_other_tokens_fail_a_comparison_in_float32_but_not_in_bfloat16(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(experiment, "Engine", Astray)
    said = (
        "1 of 8 requests got other tokens from `split` than from `collocated` in float32; "
        "the first is request 5"
    )
    with pytest.raises(TokensDiffer, match=said):
        compare(CONFIG, tmp_path / "float32")
    # The comparison is written all the same, for whoever has to find out why.
    assert names(tmp_path / "float32") >= COMPARISON_FILES
    rounded = CONFIG.replace(model=replace(CONFIG.model, dtype="bfloat16"))
    compare(rounded, tmp_path / "bfloat16")
    assert "got other tokens from `split`" in capsys.readouterr().out
