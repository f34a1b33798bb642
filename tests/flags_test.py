"""Overrides are typed, and bad input on the command line is one line that says what to do."""

import subprocess
import sys
from pathlib import Path

import pytest

from experiments.flags import load
from pdjax.core.config import Config, ConfigError

CONFIG_FILE = """
from pdjax.core.config import Config, Role, Workload

def get_config():
    return Config(
        name="file",
        placements={
            "one": {"all": Role()},
            "pd": {"p": Role(does="prefill"), "d": Role(does="decode")},
            "2P1D": {"items": Role()},  # no Python name, and the name of a mapping's method
        },
    )
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "config.py"
    file.write_text(CONFIG_FILE)
    return str(file)


def test_without_overrides_the_config_is_the_files(path: str):
    config = load(path)
    assert isinstance(config, Config)
    assert config.name == "file"
    assert config.placements["pd"]["d"].does == "decode"


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("transfer.groups=5", lambda c: c.transfer.groups, 5),
        ("transfer.schedule=whole", lambda c: c.transfer.schedule, "whole"),
        ("workload.arrivals.rate=2", lambda c: c.workload.arrivals.rate, 2.0),
        ("workload.prompt.mean=12.5", lambda c: c.workload.prompt.mean, 12.5),
        ("workload.chat=True", lambda c: c.workload.chat, True),
        ("workload.ignore_eos=false", lambda c: c.workload.ignore_eos, False),
        ("workload.trace.path=a=b.csv", lambda c: c.workload.trace.path, "a=b.csv"),
        ("name=7", lambda c: c.name, "7"),
        ("placements.pd.d.slots=16", lambda c: c.placements["pd"]["d"].slots, 16),
        ("placements.pd.p.pool.form=slab", lambda c: c.placements["pd"]["p"].pool.form, "slab"),
        ("placements.2P1D.items.slots=3", lambda c: c.placements["2P1D"]["items"].slots, 3),
    ],
)
def test_an_override_has_the_fields_type_and_changes_that_field_alone(path, override, read, value):
    config = load(path, [override])
    assert read(config) == value
    assert type(read(config)) is type(value)
    undone = f"{override.partition('=')[0]}={read(load(path))}"
    assert load(path, [override, undone]) == load(path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        # names: the nearest one, or all there are
        ("transfer.gruops=5", "did you mean `groups`"),
        ("wrkload.requests=5", "did you mean `workload`"),
        ("placements.pd.decode.slots=1", "no `decode` in placements.pd; it has `p`, `d`"),
        ("seed.x=1", "it is a single value"),
        ("transfer=1", "is a group: set one of its `transport`, `schedule`, `groups`"),
        ("transfer={'groups': 3}", "is a group: set one of its `transport`, `schedule`, `groups`"),
        ("placements.pd.d.pool=1", "set one of its `form`, `tokens`, `page_size`"),
        ("seed", "write `--config.seed=VALUE`"),
        # types and allowed values
        ("transfer.groups=few", "`few` is not of type `int`"),
        ("transfer.groups=2.5", "`2.5` is not of type `int`"),
        ("workload.arrivals.rate=fast", "`fast` is not of type `float`"),
        ("workload.chat=maybe", "`maybe` is not of type `bool`"),
        (
            "transfer.schedule=before",
            "is not one of `whole`, `chunkwise`, `layerwise`, `streaming`",
        ),
        # values that the config itself refuses
        ("transfer.groups=0", "`transfer.groups` is 0; it must be at least 1"),
        ("placements.pd.d.does=both", "placement `pd` mixes roles"),
        ("placements.pd.d.beside=x", "`beside` names `x`; other roles are ['p']"),
    ],
)
def test_a_bad_override_is_one_line_that_says_what_is_allowed(path, override, message):
    with pytest.raises(ConfigError) as error:
        load(path, [override])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_without_a_config_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"absent\.py` is not a file"):
        load(str(tmp_path / "absent.py"))
    file = tmp_path / "empty.py"
    file.write_text("")
    with pytest.raises(ConfigError, match=r"empty\.py` has no `get_config\(\)`"):
        load(str(file))
    file.write_text("def get_config(): return {}")
    with pytest.raises(ConfigError, match="returned `dict`, not `Config`"):
        load(str(file))


def _program(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "program.py"
    script.write_text(
        "from experiments.flags import run_with_config\n"
        "from pdjax.core.config import ConfigError\n"
        "def main(config, workdir):\n"
        "    print(config.transfer.groups, workdir)\n"
        "    if config.seed == 1: raise ConfigError('seed 1 is refused')\n"
        "    if config.seed == 2: raise ValueError('a bug')\n"
        "run_with_config(main)\n"
    )
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent,
        env={"PYTHONPATH": "."},
    )


def test_the_program_gets_the_config_and_the_folder(path: str, tmp_path: Path):
    done = _program(tmp_path, f"--config={path}", "--config.transfer.groups=5")
    assert (done.stdout, done.returncode) == ("5 runs/file\n", 0)
    done = _program(tmp_path, "--workdir=here", f"--config={path}")
    assert (done.stdout, done.returncode) == ("1 here\n", 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config.transfer.gruops=5"], "did you mean `groups`"),
        (["--config.seed=1"], "seed 1 is refused"),
        (["--wrkdir=x"], "workdir"),
        (["--config.seed", "3"], "`3` is not a flag"),
    ],
)
def test_bad_input_ends_the_program_with_one_line_and_status_2(path, tmp_path, arguments, message):
    done = _program(tmp_path, f"--config={path}", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_a_replay_needs_a_folder_and_no_config():
    command = [sys.executable, "-m", "experiments.replay"]
    for arguments, message in [
        ([], "no run given: add `--workdir="),
        (["--config.seed=1"], "`--config.seed=1` changes a config: name it with `--config`"),
        (["--workdir=nowhere"], "`nowhere` is not a run's folder"),
    ]:
        done = subprocess.run([*command, *arguments], capture_output=True, text=True)
        assert done.returncode == 2
        assert message in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_bug_keeps_its_traceback(path: str, tmp_path: Path):
    done = _program(tmp_path, f"--config={path}", "--config.seed=2")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_help_lists_the_fields_of_the_named_config(path: str, tmp_path: Path):
    done = _program(tmp_path, f"--config={path}", "--help")
    assert done.returncode == 0
    assert "--workdir" in done.stdout
    assert "--config.placements.pd.p.does=prefill  (prefill | decode | both)" in done.stdout
    assert "--config.placements.PLACEMENT.ROLE.slots=8" in _program(tmp_path, "--help").stdout


def test_help_shows_overrides_and_refuses_bad_ones_with_one_line(path: str, tmp_path: Path):
    done = _program(tmp_path, f"--config={path}", "--config.transfer.groups=5", "--help")
    assert "--config.transfer.groups=5\n" in done.stdout
    for arguments, message in [
        ((f"--config={path}", "--config.transfer.gruops=5"), "did you mean `groups`"),
        (("--config=absent.py",), "`--config=absent.py` is not a file"),
    ]:
        done = _program(tmp_path, *arguments, "--help")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert message in done.stderr


def test_help_has_the_flags_that_programs_share():
    done = subprocess.run(
        [sys.executable, "-m", "experiments.plan", "--help"],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    assert {"--chip:", "--model:", "--seeds:", "--tps:"} <= set(done.stdout.split())
