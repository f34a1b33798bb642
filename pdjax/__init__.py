"""A laboratory for prefill/decode disaggregated LLM inference in JAX."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdjax.core.config import Config as Config
    from pdjax.core.config import Role as Role
    from pdjax.core.request import Request as Request
    from pdjax.core.request import SamplingParams as SamplingParams
    from pdjax.engine import Engine as Engine
    from pdjax.experiment import compare as compare
    from pdjax.experiment import replay as replay
    from pdjax.experiment import serve as serve

__version__ = "0.1.0"

# Public names and where they live; they are imported when first used, so that what simulates
# or reads logs does not load jax.
_HOMES = {
    "Config": "pdjax.core.config",
    "Role": "pdjax.core.config",
    "Request": "pdjax.core.request",
    "SamplingParams": "pdjax.core.request",
    "Engine": "pdjax.engine",
    "compare": "pdjax.experiment",
    "replay": "pdjax.experiment",
    "serve": "pdjax.experiment",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module `pdjax` has no `{name}`")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
