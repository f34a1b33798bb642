"""How fast KV gets from pool to pool, and what of it a request waits for.

    python -m experiments.bench_transfer --json=bench_transfer.json

(a) GB/s of each transport for one request's KV, for each pair of tp and as one or several layer
    groups, over that of a raw jax.device_put of the same arrays, one call per group as well, which
    takes turns with it; beside memcpy, and beside jax.device_put over itself, which shows the
    noise. The faster half of the turns counts, since whatever else runs can only slow one down.
    On CPU host memory is the devices' own: `host` then shows how few copies JAX can make of it,
    not what staging costs;
(b) what checksums add to a piece's whole way: out of pages, across, into pages;
(c) per schedule, on a modelled clock, how long a request waits for its KV, beside the closed form
    max(Tx / L, Tx - Tp (L - 1) / L) for a wire time Tx, a prefill of Tp and L layer groups;
(d) pages and prefix blocks per second of the page accounting (experiments.bench_blocks).
Takes about 2 minutes on 2 cores. Close other programs first.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import mean

import jax
import numpy as np
from absl import flags
from jax.sharding import Mesh
from tqdm import tqdm

from experiments import bench_blocks
from experiments.bench_common import JSON, Row, report
from experiments.flags import run, setup_devices
from pdjax.core.config import SLO, Clock, Config, Link, Model, Pool, Role, Transfer
from pdjax.core.loop import serve
from pdjax.core.policies.transfer import SCHEDULES
from pdjax.core.request import Request, SamplingParams
from pdjax.engine import Engine
from pdjax.experiment import environment
from pdjax.metrics import analyse
from pdjax.programs.kv import Layout, make_pool, piece_sharding
from pdjax.programs.mesh import make_mesh
from pdjax.programs.transfer import transfer_programs
from pdjax.programs.transports import TRANSPORTS
from pdjax.programs.weights import open_checkpoint
from pdjax.workload import Source

TOKENS = flags.DEFINE_integer("tokens", 4096, "Tokens of the request whose KV is moved.")
TURNS = flags.DEFINE_integer("turns", 30, "How often each transport takes its turn.")
flags.declare_key_flag("json")

LAYERS, K, H = 8, 4, 64  # float32: 16 KiB per token
GROUPS = (1, 8)
TP = ((1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 2), (4, 4))
PAGE = 16


def raw(part: Sequence[jax.Array], target: Mesh) -> object:
    return jax.device_put(part, piece_sharding(target, K))


WAYS = {**TRANSPORTS, "jax.device_put": raw}  # itself beside itself: how much noise there is


def main() -> None:
    setup_devices(8)
    rows = [memcpy()]
    ways = [(tp, groups, name) for tp in TP for groups in GROUPS for name in WAYS]
    for tp, groups, name in tqdm(ways, desc="transports", unit="way"):
        rows += moved(name, tp, groups)
    rows += [*checksums(), *waits(), *bench_blocks.rows()]
    report(rows, JSON.value, environment(Config(placements={"one": {"server": Role()}})))


# --- (a) -----------------------------------------------------------------------------------


def memcpy() -> Row:
    source = np.ones(_nbytes() // 4, np.float32)
    target = np.zeros_like(source)
    taken_s, _ = in_turns(lambda: np.copyto(target, source), lambda: None)
    return Row("memcpy", _nbytes() / taken_s / 1e9, "GB/s")


def _nbytes() -> int:
    return LAYERS * 2 * TOKENS.value * K * H * 4


def moved(name: str, tp: tuple[int, int], groups: int) -> Iterator[Row]:
    """A transport beside jax.device_put."""
    source = make_mesh(jax.devices()[: tp[0]])
    target = make_mesh(jax.devices()[4 : 4 + tp[1]])
    rng = np.random.default_rng(0)
    place = piece_sharding(source, K)
    shape, size = (2, TOKENS.value, K, H), LAYERS // groups
    piece = [jax.device_put(rng.standard_normal(shape, np.float32), place) for _ in range(LAYERS)]
    parts = [piece[at : at + size] for at in range(0, LAYERS, size)]
    our_s, raw_s = in_turns(
        lambda: jax.block_until_ready([WAYS[name](part, target) for part in parts]),
        lambda: jax.block_until_ready([raw(part, target) for part in parts]),
    )
    what = f"{name}, tp {tp[0]} to {tp[1]}, {_groups(groups)}"
    yield Row(what, _nbytes() / our_s / 1e9, "GB/s")
    goal = ">= 0.95" if name == "device_put" else ""
    yield Row(f"{what}, over jax.device_put", raw_s / our_s, "x", goal)


def _groups(groups: int) -> str:
    return f"{groups} groups" if groups > 1 else "whole"


def in_turns(ours: Callable[[], object], theirs: Callable[[], object]) -> tuple[float, float]:
    """Seconds of each, called one after the other, who is first by turns. The first pair does not
    count, and of the others the faster half of each."""
    taken: tuple[list[float], list[float]] = ([], [])
    for turn in range(TURNS.value + 1):
        for who in (0, 1) if turn % 2 else (1, 0):
            began = time.perf_counter()
            (ours, theirs)[who]()
            taken[who].append(time.perf_counter() - began)
    faster = (sorted(times[1:])[: -(-TURNS.value // 2)] for times in taken)
    ours_s, theirs_s = (mean(times) for times in faster)
    return ours_s, theirs_s


# --- (b) -----------------------------------------------------------------------------------


def checksums() -> Iterator[Row]:
    """One layer group's whole way, with checksums and without."""
    meshes = [make_mesh(jax.devices()[at : at + 1]) for at in (0, 4)]
    pages = -(-TOKENS.value // PAGE)
    layout = Layout("bench", LAYERS, K, H, "float32", PAGE, pages, 1)
    table_n = np.random.default_rng(0).permutation(pages).astype(np.int32)
    span = np.int32(0), np.int32(TOKENS.value)

    def way(checksum: bool) -> Callable[[], object]:
        extract, insert = (transfer_programs(mesh, K, checksum) for mesh in meshes)
        pools = [make_pool(layout, mesh) for mesh in meshes]

        def go() -> None:
            piece = extract.extract(pools[0], table_n, *span, T=TOKENS.value)
            piece = piece._replace(kv=TRANSPORTS["device_put"](piece.kv, meshes[1]))
            pools[1], landing = insert.insert(pools[1], piece, table_n, *span)
            assert landing.intact()

        return go

    with_s, without_s = in_turns(way(True), way(False))
    yield Row("pool to pool, whole", _nbytes() / without_s / 1e9, "GB/s")
    what = "pool to pool, whole, with checksums over without"
    yield Row(what, with_s / without_s, "x time")


# --- (c) -----------------------------------------------------------------------------------

PROMPT, CHUNK, STEPS = 256, 64, 4
WIRE = Link(bytes_per_s=1e7)  # a prompt's KV crosses in about the time of its prefill


def waits() -> Iterator[Row]:
    """Requests of the tiny model, one at a time, so that nobody waits for another."""
    pool = Pool(tokens=1024, page_size=PAGE)
    placement = {
        "prefill": Role("prefill", chunk=CHUNK, pool=pool),
        "decode": Role("decode", pool=pool, slots=1),
    }
    checkpoint = open_checkpoint("random:tiny")
    groups = checkpoint.arch.L
    requests = tuple(
        Request(i, i * 10**9, PROMPT, SamplingParams(STEPS), prompt=(i + 1,) * PROMPT)
        for i in range(3)
    )
    for schedule in SCHEDULES:
        config = Config(
            placements={"split": placement},
            model=Model("random:tiny", context=PROMPT + CHUNK),
            transfer=replace(Transfer(groups=groups, link=WIRE), schedule=schedule),
            clock=Clock("modelled"),
        )
        engine = Engine(config, "split", checkpoint)
        records = list(serve(Source(requests), engine.backend(), engine.scheduler()))
        moves = analyse(records, placement, SLO()).moves
        for column in ("wire_s", "exposed_s", "closed_form_s"):
            what = f"modelled, {schedule}, {groups} groups: {column.removesuffix('_s')}"
            yield Row(what.replace("_", " "), 1e3 * float(np.median(moves[column])), "ms")


if __name__ == "__main__":
    run(main)
