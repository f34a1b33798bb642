"""The frame of reproductions: rows, verdicts, folders, and the page of many of them."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments.reproduce import load, one, reproduce_all
from pdjax.core.config import ConfigError
from pdjax.reproduce import Reproduction, Row, beside, judged, near, trace_file
from pdjax.reproduce.pages import Result, read, table, text, write
from pdjax.reproduce.result import mean_and_interval
from pdjax.traces import TraceError

REPO = Path(__file__).parent.parent
CONFIG = '''"""A claim.

What stands in for what."""
from pdjax.reproduce import Reproduction, beside, judged, near

def reproduce():
    rows = (
        near("<speed>", 2.0, 2.1, within=0.1, source="table 1", unit="s", interval=(1.9, 2.3)),
        judged("shape", "up", "down", False, criterion="same", source="figure 2"),
        beside("colour", "-", "blue", source="nowhere"),
    )
    figure = '<svg xmlns="http://www.w3.org/2000/svg"></svg>'
    return Reproduction(
        title="Speeds", samples="3 seeds", rows=rows, figure=figure, caption="Look.",
        notes=("Note.",),
    )
'''
CHEAP = ("mooncake_transfer", "seed_links")


def config_file(folder: Path, name: str = "speeds", text: str = CONFIG) -> Path:
    path = folder / f"{name}.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("row", "verdict", "criterion"),
    [
        # 10 % of 2 is 0.2, of which 2.2 is just within and 2.21 is not; below counts as above
        (near("a", 2.0, 2.2, within=0.1000001, source=""), "reproduced", "within 10 %"),
        (near("a", 2.0, 2.21, within=0.1, source=""), "not reproduced", "within 10 %"),
        (near("a", 2.0, 1.79, within=0.1, source=""), "not reproduced", "within 10 %"),
        (near("a", -2.0, -1.9, within=0.1, source=""), "reproduced", "within 10 %"),
        (near("a", 18, 18, within=0, source=""), "reproduced", "equal"),
        (near("a", 18, 18.01, within=0, source=""), "not reproduced", "equal"),
        (near("a", 2.0, float("nan"), within=9, source=""), "not reproduced", "within 900 %"),
        (judged("a", "x", "y", True, criterion="c", source=""), "reproduced", "c"),
        (judged("a", "x", "y", None, criterion="c", source=""), "undecided", "c"),
        (beside("a", "x", "y", source=""), "", ""),
    ],
)
def test_a_verdict_follows_from_the_criterion(row: Row, verdict: str, criterion: str):
    assert (row.verdict, row.criterion) == (verdict, criterion)


def test_a_reproduction_counts_what_was_judged():
    rows = [near("a", 1, value, within=0, source="") for value in (1, 1, 2)]
    rows += [beside("b", 1, 2, source=""), judged("c", 1, 2, None, criterion="", source="")]
    found = Reproduction(title="", samples="", rows=tuple(rows), figure="", caption="")
    assert found.verdict == "2 of 4 reproduced, 1 undecided"


def test_numbers_have_four_digits_and_counts_all_of_theirs():
    assert [text(value) for value in (12031, 36.5512, 0.0012345, "x1.3")] == [
        "12,031", "36.55", "0.001234", "x1.3",
    ]  # fmt: skip


@pytest.mark.parametrize(("value", "word"), [(np.inf, "inf"), (-np.inf, "-inf"), (np.nan, "nan")])
def test_what_is_infinite_or_no_number_is_a_word_wherever_it_is_shown(
    value: float, word: str, tmp_path: Path
):
    """JSON has none of the three, so a row that kept one could not be read back."""
    assert text(value) == word
    rows = (near("a", value, 1.0, within=0.1, source=""), beside("b", 1.0, value, source=""))
    found = Reproduction(title="", samples="", rows=rows, figure="<svg/>", caption="")
    result = Result(name="it", about="", reproduction=found)
    write(tmp_path / "it", result)
    assert read(tmp_path / "it") == result
    assert (rows[0].published, rows[1].obtained) == (word, word)
    assert rows[0].verdict == "not reproduced" and word in table(result)


def test_an_interval_is_students_over_seeds_and_needs_two():
    """Of 1, 2, 3: 2 +- 4.303 * 1 / sqrt(3); rates end at 0. (4.303: the table's 0.975 for 2.)"""
    mean, interval = mean_and_interval([1, 2, 3])
    assert mean == 2 and interval == (0.0, pytest.approx(2 + 4.3027 / 3**0.5, abs=1e-4))
    assert mean_and_interval([7.0]) == (7.0, None)


def test_a_result_is_written_whole_and_read_back(tmp_path: Path):
    result = one(config_file(tmp_path), tmp_path / "out")
    folder = tmp_path / "out" / "speeds"
    assert read(folder) == result
    assert result.about == "A claim.\n\nWhat stands in for what."
    assert (folder / "figure.svg").read_text().startswith("<svg")
    lines = (folder / "rows.csv").read_text().splitlines()
    assert len(lines) == 4 and lines[1].startswith("<speed>,2.0,2.1,table 1,s,within 10 %")
    printed = table(result)
    assert "1 of 2 reproduced" in printed and "not reproduced" in printed and "Note." in printed
    assert "1.9 to 2.3" in printed and "Samples: 3 seeds." in printed


def test_a_result_that_is_there_is_kept_unless_asked_again(tmp_path: Path, capsys):
    path, out = config_file(tmp_path), tmp_path / "out"
    reproduce_all([path], out, again=False)
    config_file(tmp_path, text=CONFIG.replace("2.1", "9.9"))
    capsys.readouterr()
    (kept,) = reproduce_all([path], out, again=False)
    assert kept.reproduction.rows[0].obtained == 2.1
    assert "speeds: kept from" in capsys.readouterr().out
    (fresh,) = reproduce_all([path], out, again=True)
    assert fresh.reproduction.rows[0].obtained == 9.9
    assert fresh.reproduction.rows[0].verdict == "not reproduced"


def test_what_cannot_run_is_said_and_does_not_stop_the_others(tmp_path: Path):
    text = CONFIG.replace("    rows =", "    from pdjax.traces import TraceError\n"
                          "    raise TraceError('no trace here')\n    rows =")  # fmt: skip
    paths = [config_file(tmp_path, "absent", text), config_file(tmp_path)]
    absent, speeds = reproduce_all(paths, tmp_path / "out", again=False)
    assert (absent.why_not, absent.reproduction) == ("no trace here", None)
    assert speeds.reproduction is not None
    assert read(tmp_path / "out" / "absent") is None  # so it is tried again
    page = (tmp_path / "out" / "index.html").read_text()
    assert "not run: no trace here" in page and "&lt;speed&gt;" in page and "<speed>" not in page


def test_an_interrupt_leaves_the_page_of_what_is_done(tmp_path: Path, capsys):
    stop = CONFIG.replace("    rows =", "    raise KeyboardInterrupt\n    rows =")
    paths = [config_file(tmp_path), config_file(tmp_path, "stop", stop)]
    results = reproduce_all(paths, tmp_path / "out", again=False)
    assert [result.name for result in results] == ["speeds"]
    printed = capsys.readouterr().out
    assert "[2/2] stop" in printed and "interrupted: the page has 1 of 2" in printed
    page = (tmp_path / "out" / "index.html").read_text()
    assert 'id="speeds"' in page and "1 of 2 so far" in page


def test_a_bug_in_the_second_leaves_the_page_of_the_first(tmp_path: Path):
    bug = CONFIG.replace("    rows =", "    raise ZeroDivisionError\n    rows =")
    paths = [config_file(tmp_path), config_file(tmp_path, "bug", bug)]
    with pytest.raises(ZeroDivisionError):
        reproduce_all(paths, tmp_path / "out", again=False)
    page = (tmp_path / "out" / "index.html").read_text()
    assert "Samples: 3 seeds." in page and "1.9 to 2.3" in page
    assert read(tmp_path / "out" / "speeds") is not None


def test_a_bug_is_no_verdict(tmp_path: Path):
    path = config_file(
        tmp_path, text=CONFIG.replace("    rows =", "    raise ValueError\n    rows =")
    )
    with pytest.raises(ValueError):
        one(path, tmp_path)


def test_a_file_that_is_no_reproduction_is_told(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"absent\.py` is not a file"):
        load(tmp_path / "absent.py")
    with pytest.raises(ConfigError, match=r"has no `reproduce\(\)`"):
        load(config_file(tmp_path, text="x = 1"))


def test_a_missing_trace_is_one_line_that_says_where_it_was_sought(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PDJAX_TRACES", str(tmp_path))
    with pytest.raises(TraceError, match=r"no trace at .*set `PDJAX_TRACES`") as error:
        trace_file("mooncake/x.jsonl")
    assert "\n" not in str(error.value)
    (tmp_path / "here.csv").write_text("")
    assert trace_file("here.csv") == tmp_path / "here.csv"


def test_two_cheap_configs_become_one_page_with_both_figures(tmp_path: Path):
    paths = [REPO / "configs/papers" / f"{name}.py" for name in CHEAP]
    results = reproduce_all(paths, tmp_path, again=False)
    page = (tmp_path / "index.html").read_text()
    assert page.count("<svg") == 2
    for result in results:
        assert f'<section id="{result.name}">' in page
        assert result.reproduction.title.replace("'", "&#39;") in page
        assert len(result.reproduction.rows) > 5
        # Every row has its source, and none is judged without saying by what.
        assert all(row.source for row in result.reproduction.rows)
        assert all(bool(row.criterion) == bool(row.verdict) for row in result.reproduction.rows)


def test_every_config_says_its_command_and_names_its_function():
    paths = [path for path in (REPO / "configs/papers").glob("*.py") if path.stem != "__init__"]
    assert len(paths) >= 7
    for path in paths:
        about, _ = load(path)
        command = f"python -m experiments.reproduce --config=configs/papers/{path.name}"
        assert command in about, path
        assert "Takes " in about.replace("\n", " "), path


def _program(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "experiments.reproduce", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=REPO)


def test_the_program_prints_the_rows_and_writes_the_page(tmp_path: Path):
    done = _program("--config=configs/papers/seed_links.py", f"--workdir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "256 MiB over NVLink" in done.stdout
    assert (tmp_path / "seed_links" / "index.html").exists()


def test_the_program_wants_a_config_or_all():
    done = _program()
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "give `--config=configs/papers/NAME.py`, or `--all`" in done.stderr


def test_nothing_here_loads_jax():
    modules = ["links", "mooncake", "dynamo", "forms", "boundary", "pages"]
    imports = "; ".join(f"import pdjax.reproduce.{name}" for name in modules)
    code = f"{imports}; import sys; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPO)
