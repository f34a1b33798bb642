"""The command line of the experiments: a typed config, overrides of its fields, one-line errors.

    python -m experiments.compare --config=configs/quickstart.py --config.transfer.groups=1

`--config` names a Python file whose `get_config()` returns a `Config`; `--config.FIELD=VALUE`
replaces one field of it, `--config.placements.NAME.ROLE.FIELD=VALUE` one of a role. The text is
converted to the field's annotated type and the whole config is validated again.

ml_collections' config_flags is not used: it cannot write to frozen dataclasses, takes no Literal,
and reads a path as a Python expression, so that `placements.2P1D` is a syntax error. Over a
ConfigDict it also accepts `--config.transfer={'gruops': 3}`, and the names, groups and choices
would all have to be checked here before it sees them, which takes more code than to set a field.
"""

import dataclasses
import difflib
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import msgspec
from absl import app, flags

from pdjax.core.config import Config, ConfigError, Role

PREFIX = "--config."

# The flags defined here show in the help of the program that asks for them.
flags.disclaim_key_flags()


def run(main: Callable[[], None]) -> None:
    """Parses the flags and calls `main`; bad input ends the program with one line and status 2."""
    _run(main, flags.FLAGS)


def run_with_config(main: Callable[[Config, Path], None]) -> None:
    """Like `run`, with the config and the results' folder that the command line names."""

    def with_config(config: Config | None, workdir: Path | None) -> None:
        if config is None:
            raise ConfigError("no config given: add `--config=configs/quickstart.py`, or another")
        main(config, workdir or Path(f"runs/{config.name}"))

    run_with_any_config(with_config)


def run_with_any_config(main: Callable[[Config | None, Path | None], None]) -> None:
    """Like `run_with_config`, where neither need be given."""
    path = flags.DEFINE_string("config", None, "A Python file whose get_config() returns a Config.")
    workdir = flags.DEFINE_string("workdir", None, "Folder for results (default: runs/NAME).")
    overrides: list[str] = []

    def parse(argv: Sequence[str]) -> list[str]:
        overrides[:] = _overrides(argv)
        return flags.FLAGS([arg for arg in argv if not arg.startswith(PREFIX)])

    def main_with_config() -> None:
        if path.value is None and overrides:
            raise ConfigError(f"`{PREFIX}{overrides[0]}` changes a config: name it with `--config`")
        config = None if path.value is None else load(path.value, overrides)
        main(config, None if workdir.value is None else Path(workdir.value))

    _run(main_with_config, parse)


def load(path: str, overrides: Sequence[str] = ()) -> Config:
    """The config of a file with overrides such as `transfer.groups=5`.

    Raises ConfigError with one line: what is wrong, the nearest name, or the allowed values.
    """
    config = _read(path)
    tree = msgspec.to_builtins(config)
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"`{PREFIX}{name}` has no value: write `{PREFIX}{name}=VALUE`")
        *parents, leaf = name.split(".")
        value = _convert(name, text, _field_type(config, name))
        branch = tree
        for parent in parents:
            branch = branch[parent]
        branch[leaf] = value
    try:
        return msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error.__cause__ or error)) from None


def setup_devices(count: int = 8) -> None:
    """Makes the CPU look like `count` devices and keeps compiled programs in .cache/jax.

    Call it before jax first asks for devices. Environment variables win over both choices.
    """
    import jax

    chosen = "JAX_NUM_CPU_DEVICES" in os.environ or "device_count" in os.getenv("XLA_FLAGS", "")
    if not chosen:
        jax.config.update("jax_num_cpu_devices", count)
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(Path(".cache/jax").absolute()))


def _run(main: Callable[[], None], parse: Callable[[Sequence[str]], list[str]]) -> None:
    def parse_or_exit(argv: Sequence[str]) -> list[str]:
        try:
            if {"--help", "-help", "-h"} & set(argv):
                _exit_with_help(argv)
            rest = parse(argv)
        except (flags.Error, ConfigError) as error:
            _exit(str(error))
        if rest[1:]:
            _exit(f"`{rest[1]}` is not a flag; flags are written `--name=value`")
        return rest

    def main_or_exit(_: Sequence[str]) -> None:
        try:
            main()
        except ValueError as error:
            # pdjax's own errors say all there is to say; any other is a bug and keeps its trace.
            if not type(error).__module__.startswith("pdjax."):
                raise
            _exit(str(error))

    app.run(main_or_exit, flags_parser=parse_or_exit)


def _exit(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def _overrides(argv: Sequence[str]) -> list[str]:
    return [arg.removeprefix(PREFIX) for arg in argv if arg.startswith(PREFIX)]


def _read(path: str) -> Config:
    if not Path(path).is_file():
        raise ConfigError(f"`--config={path}` is not a file; configs/ has some to start from")
    get_config = runpy.run_path(path).get("get_config")
    if get_config is None:
        raise ConfigError(f"`{path}` has no `get_config()`")
    config = get_config()
    if not isinstance(config, Config):
        raise ConfigError(
            f"`get_config()` of `{path}` returned `{type(config).__name__}`, not `Config`"
        )
    return config


def _children(node: Any) -> dict[str, Any]:
    """What lies one level below in a config: fields by name, or the entries of a mapping."""
    if dataclasses.is_dataclass(node):
        return {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
    return dict(node) if isinstance(node, Mapping) else {}


def _field_type(config: Config, name: str) -> Any:
    """The annotated type of the field that a dotted name reaches."""
    node: Any = config
    parent: Any = None
    for depth, part in enumerate(parts := name.split(".")):
        here = ".".join(parts[:depth]) or "the config"
        children = _children(node)
        if part not in children:
            near = difflib.get_close_matches(part, children, n=1)
            hint = f"did you mean `{near[0]}`? " if near else ""
            known = f"it has {_quoted(children)}" if children else "it is a single value"
            raise ConfigError(f"`{PREFIX}{name}`: no `{part}` in {here}; {hint}{known}")
        parent, node = node, children[part]
    if children := _children(node):
        raise ConfigError(f"`{PREFIX}{name}` is a group: set one of its {_quoted(children)}")
    return get_type_hints(type(parent))[parts[-1]]


def _convert(name: str, text: str, kind: Any) -> Any:
    try:
        return msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError:
        if get_origin(kind) is Literal:
            wanted = f"one of {_quoted(get_args(kind))}"
        else:
            wanted = f"of type `{kind.__name__}`"
        raise ConfigError(f"`{PREFIX}{name}={text}`: `{text}` is not {wanted}") from None


def _quoted(names: Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _exit_with_help(argv: Sequence[str]) -> NoReturn:
    """Shows the flags and every field of a config: of the one that `argv` gives, if any."""
    for module, shared in flags.FLAGS.flags_by_module_dict().items():
        if module.startswith("experiments."):  # absl shows those of the main module only
            for flag in shared:
                flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
    app.usage(shorthelp=True, writeto_stdout=True)
    if "config" in flags.FLAGS:
        given = [arg.partition("=")[2] for arg in argv if arg.startswith("--config=")]
        if given:
            config = load(given[-1], _overrides(argv))
        else:
            config = Config(placements={"PLACEMENT": {"ROLE": Role()}})
        print(f"\nFields of {given[-1] if given else 'a config'}, each set with its flag:")
        print("\n".join(f"  {PREFIX}{line}" for line in _fields(config)))
    sys.exit(0)


def _fields(node: Any, prefix: str = "") -> Iterator[str]:
    for name, child in _children(node).items():
        if _children(child):
            yield from _fields(child, f"{prefix}{name}.")
        else:
            kind = get_type_hints(type(node))[name]
            choices = f"  ({' | '.join(get_args(kind))})" if get_origin(kind) is Literal else ""
            yield f"{prefix}{name}={child}{choices}"
