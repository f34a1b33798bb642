"""Which implementation of a kernel runs."""

import warnings
from collections.abc import Callable, Mapping

import jax

IMPLEMENTATIONS = ("auto", "xla", "tpu", "gpu", "tpu_interpret", "gpu_interpret")
"""`auto` takes the device's kernel, or `xla` where there is none. The two `interpret`s run a
kernel on any device, slowly, for tests."""


class UnsupportedError(ValueError):
    """An implementation cannot do this: what it was given, and what to change."""


def run(implementation: str, backends: Mapping[str, Callable[[], Callable]], *args, **kwargs):
    """Calls one of `backends` (`xla`, `tpu`, `gpu`: each a function that imports and returns it).
    A backend raises UnsupportedError to decline; who named it sees that, `auto` warns and
    falls back to `xla`."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"`implementation` {implementation!r} is none of {', '.join(IMPLEMENTATIONS)}"
        )
    name, _, interpret = implementation.partition("_")
    if name == "auto":
        name = _preferred()
    if name == "xla":
        return backends["xla"]()(*args, **kwargs)
    try:
        return backends[name]()(*args, **kwargs, interpret=bool(interpret))
    except UnsupportedError as error:
        if implementation != "auto":
            raise
        warnings.warn(f"`auto` falls back to `xla`: {error}", stacklevel=3)
        return backends["xla"]()(*args, **kwargs)


def _preferred() -> str:
    device = jax.devices()[0]
    if device.platform == "tpu":
        return "tpu"
    # Mosaic GPU kernels are written for Hopper.
    if device.platform == "gpu" and float(getattr(device, "compute_capability", "0")) >= 9.0:
        return "gpu"
    return "xla"
