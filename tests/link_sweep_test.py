"""A sweep over links: on the modelled clock what a request waits for is the closed form, and a
sweep that was interrupted goes on where it stopped."""

import dataclasses

import pytest

from configs import links
from experiments import link_sweep
from pdjax import experiment
from pdjax.core.config import Arrivals, Clock, Config, ConfigError, Lengths, Link, Model, Workload

SPEED = 1e6  # bytes/s: the wire takes some 4 times as long as the prefill
LINK = Link(bytes_per_s=SPEED)


def config() -> Config:
    return links.get_config().replace(
        model=Model("random:tiny", context=128),
        clock=Clock("modelled"),
        workload=Workload(
            requests=2,
            arrivals=Arrivals(process="closed", concurrency=1),
            prompt=Lengths(mean=64),
            output=Lengths(mean=3),
            text="random",
        ),
        transfer=dataclasses.replace(links.get_config().transfer, groups=4),
    )


def ways(*schedules: str) -> dict:
    transfer = config().transfer
    return {s: dataclasses.replace(transfer, schedule=s, link=LINK) for s in schedules}


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    runs = dict(experiment.sweep(config(), "disaggregated", ways("whole", "layerwise"), folder))
    rows = {name: link_sweep.measured(name, "slow", LINK, run) for name, run in runs.items()}
    return folder, rows


def test_what_is_waited_for_is_the_closed_form(swept):
    whole, layerwise = swept[1]["whole"], swept[1]["layerwise"]
    alone_ms = whole.mb * 1e6 / SPEED * 1e3
    assert whole.exposed_ms == pytest.approx(alone_ms, rel=1e-6)
    assert layerwise.wire_ms == pytest.approx(alone_ms, rel=1e-6)
    prefill_ms = whole.ttft_ms  # nothing queues, and the first token ends the prefill
    assert layerwise.exposed_ms == pytest.approx(alone_ms - prefill_ms * 3 / 4, rel=1e-3)
    assert layerwise.closed_form_ms == pytest.approx(layerwise.exposed_ms, rel=1e-3)
    hidden = whole.exposed_ms - layerwise.exposed_ms
    assert (whole.tpot_ms - layerwise.tpot_ms) * 2 == pytest.approx(hidden, rel=1e-3)  # two gaps


def test_what_is_there_is_not_run_again(swept, monkeypatch):
    folder, rows = swept
    monkeypatch.setattr(experiment, "Engine", None)
    again = dict(experiment.sweep(config(), "disaggregated", ways("whole", "layerwise"), folder))
    for name, run in again.items():
        assert link_sweep.measured(name, "slow", LINK, run) == rows[name]


def test_a_run_that_was_cut_short_is_run_again(swept, monkeypatch):
    folder, _ = swept
    monkeypatch.setattr(experiment, "Engine", None)
    monkeypatch.setattr(experiment.Path, "exists", lambda path: path.name != "outputs.jsonl")
    with pytest.raises(TypeError, match="NoneType"):  # as it asks for an engine
        next(experiment.sweep(config(), "disaggregated", ways("whole"), folder))


def test_a_folder_of_another_config_is_refused(swept):
    other = config().replace(seed=7)
    with pytest.raises(ConfigError, match="has a run of another config: name another `--workdir`"):
        next(experiment.sweep(other, "disaggregated", ways("whole"), swept[0]))


def test_links_go_from_fast_to_slow():
    assert list(link_sweep.links(["3e7", "tcp-10g", "1e12", "nvlink4"])) == [
        "1e12", "nvlink4", "tcp-10g", "3e7",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["nvlink1", "0", "-3", "inf", "nan"])
def test_what_is_no_link_is_refused(name):
    with pytest.raises(ConfigError, match=f"`{name}` is neither bytes/s nor one of nvlink3, "):
        link_sweep.links(["1e7", name])


def test_the_figure_has_a_line_per_schedule(swept):
    rows = list(swept[1].values())
    picture = link_sweep.draw(rows)
    assert picture.startswith("<svg") and all(name in picture for name in ("whole", "layerwise"))
