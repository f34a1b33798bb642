"""How long KV needs on a link: Mooncake's measurements, and an introductory article's estimates."""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from pdjax.catalogue import MODELS, Shape
from pdjax.core.config import Link
from pdjax.links import NANOSECONDS, Network
from pdjax.report_style import LINE_STYLES, PLACEMENT_COLOURS, WIDTH, log_ticks
from pdjax.reproduce.result import Reproduction, Row, beside, drawn, judged, near

MIB = 2**20
GIB = 2**30


def seconds_on(link: Link, nbytes: int) -> float:
    """How long one transfer of so many bytes takes, by the network that simulations use."""
    network = Network(link)
    network.start(0, 0, "prefill", "decode", nbytes)
    arrives_ns = network.next_finish()
    assert arrives_ns is not None
    return arrives_ns / NANOSECONDS


# --- Mooncake's measurements ---------------------------------------------------------------


class Measured(NamedTuple):
    """KV of a prompt of so many tokens took so many milliseconds; the size is as it was told."""

    tokens: int
    size: str
    ms: float


VLLM = (
    Measured(128, "20 MB", 0.54),
    Measured(256, "38 MB", 0.61),
    Measured(512, "74 MB", 0.92),
    Measured(1024, "146 MB", 1.50),
    Measured(2048, "290 MB", 2.51),
    Measured(4096, "578 MB", 4.75),
    Measured(8192, "1.13 GB", 8.84),
    Measured(16384, "2.25 GB", 16.43),
    Measured(32768, "4.50 GB", 31.65),
)
"""Mooncake, docs/source/performance/vllm-v1-support-benchmark.md (commit 6af048f): Qwen3-8B, TP 8,
H800, eight ConnectX-7 of together about 200 GB/s, vLLM 0.11.2, one request at a time."""
VLLM_BLOCK = 16  # tokens; the chat template of the benchmark adds one block to every prompt
NOMINAL = 200e9  # bytes/s


def mooncake_transfer() -> Reproduction:
    """Sizes from the model's shape; times from a latency and a bandwidth that are fitted to the
    shortest and the longest prompt and predict the seven between."""
    shape = MODELS["qwen3-8b"]
    sizes = [_vllm_bytes(shape, measured.tokens) for measured in VLLM]
    link = _through(sizes[0], VLLM[0].ms / 1e3, sizes[-1], VLLM[-1].ms / 1e3)
    ours_ms = [1e3 * seconds_on(link, size) for size in sizes]
    source = "Mooncake docs, vllm-v1-support-benchmark.md"
    rows: list[Row] = []
    for measured, size in zip(VLLM, sizes, strict=True):
        said, unit = measured.size.split()
        ours = size / (GIB if unit == "GB" else MIB)
        digits = len(said.partition(".")[2])
        holds = f"{ours:.{digits}f}" == said
        criterion = f"equal to {digits} digits, read as {'GiB' if unit == 'GB' else 'MiB'}"
        rows.append(
            judged(
                f"KV of {measured.tokens} tokens", float(said), ours, holds,
                criterion=criterion, source=source, unit=unit[0] + "iB",
            )
        )  # fmt: skip
    for measured, ms in zip(VLLM[1:-1], ours_ms[1:-1], strict=True):
        what = f"transfer of {measured.tokens} tokens"
        rows.append(near(what, measured.ms, ms, within=0.1, source=source, unit="ms"))
    best = sizes[-1] / (VLLM[-1].ms / 1e3)
    rows += [
        near(
            "highest bandwidth, in GiB/s", 142.25, best / GIB, within=0.005, source=source,
            unit="GiB/s",
        ),
        beside(
            "share of the nominal 200 GB/s", "71.1 %", f"{best / NOMINAL:.1%}", source=source
        ),
    ]  # fmt: skip
    return Reproduction(
        title="Mooncake's measured KV transfers, and a link of latency and bandwidth",
        samples=f"{len(VLLM)} published means, 2 of them fitted to; no chance in the link model",
        rows=tuple(rows),
        figure=drawn(lambda: _transfer_figure(sizes, link)),
        caption="Left: time against size, measured (dots) and by the link model (line). Right: the "
        "error of the model; filled dots are the two points that it was fitted to.",
        notes=(
            f"Fitted, to the first and the last row: latency {1e3 * link.latency_s:.2f} ms, "
            f"bandwidth {link.bytes_per_s / 1e9:.1f} GB/s. The other seven rows are predictions.",
            "The table's MB and GB are MiB and GiB: only so do they follow from the shape (144 KiB "
            "a token, one block of 16 tokens more than the prompt has). The share of the nominal "
            "bandwidth mixes GiB/s with GB/s; in one unit it is higher.",
        ),
    )


def _vllm_bytes(shape: Shape, tokens: int) -> int:
    return round(shape.kv_token_bytes()) * (tokens + VLLM_BLOCK)


def _through(bytes_0: int, seconds_0: float, bytes_1: int, seconds_1: float) -> Link:
    """The link on which both transfers take as long as they did."""
    bytes_per_s = (bytes_1 - bytes_0) / (seconds_1 - seconds_0)
    return Link(bytes_per_s=bytes_per_s, latency_s=seconds_0 - bytes_0 / bytes_per_s)


def _transfer_figure(sizes: Sequence[int], link: Link) -> Figure:
    figure = Figure(figsize=(WIDTH, 3.4))
    times, errors = figure.subplots(1, 2)
    measured_ms = [measured.ms for measured in VLLM]
    ours_ms = [1e3 * seconds_on(link, size) for size in sizes]
    mib = [size / MIB for size in sizes]
    times.loglog(mib, ours_ms, color=PLACEMENT_COLOURS[0], label="link model")
    times.loglog(mib, measured_ms, "o", color=PLACEMENT_COLOURS[1], label="measured")
    times.set(xlabel="KV (MiB)", ylabel="transfer (ms)", title="Time")
    log_ticks(times.yaxis)
    times.legend()
    percent = [100 * (a / b - 1) for a, b in zip(ours_ms, measured_ms, strict=True)]
    fitted = (0, len(sizes) - 1)
    errors.axhspan(-10, 10, color="#eeeeee")
    for i, (x, y) in enumerate(zip(mib, percent, strict=True)):
        fill = PLACEMENT_COLOURS[0] if i in fitted else "white"
        errors.plot(x, y, "o", color=PLACEMENT_COLOURS[0], markerfacecolor=fill)
    errors.set(xscale="log", xlabel="KV (MiB)", ylabel="model - measured (%)", title="Error")
    return figure


# --- an article's estimates ----------------------------------------------------------------

SEED_BYTES = 256 * MIB


class Estimate(NamedTuple):
    """A time that the article gives for 256 MiB, the link that it means, and what is wrong."""

    what: str
    ms: float
    at_least: bool
    link: Link
    why: str


SEED_TIMES = (
    Estimate(
        "NVLink 4", 0.28, False, Link(bytes_per_s=450e9),
        "900 GB/s is both directions together; KV goes one way, at 450",
    ),
    Estimate("GPUDirect RDMA, 400 Gb/s", 5.1, False, Link(bytes_per_s=50e9), ""),
    Estimate("TCP, 10 Gb/s", 50.0, True, Link(preset="tcp-10g"), ""),
)  # fmt: skip


def seed_links() -> Reproduction:
    """KV sizes and transfer times as a survey article gives them, and as they follow."""
    source = "article on PD in clusters (it names no source)"
    rows = _seed_sizes(source)
    for claim in SEED_TIMES:
        ms = 1e3 * seconds_on(claim.link, SEED_BYTES)
        what = f"256 MiB over {claim.what}"
        if claim.at_least:
            rows.append(
                judged(
                    what, f"> {claim.ms:g}", ms, ms > claim.ms,
                    criterion="above", source=source, unit="ms",
                )
            )  # fmt: skip
        else:
            rows.append(near(what, claim.ms, ms, within=0.1, source=source, unit="ms"))
    return Reproduction(
        title="KV sizes and link times of two articles, corrected",
        samples="arithmetic: nothing is drawn or measured",
        rows=tuple(rows),
        figure=drawn(_seed_figure),
        caption="Transfer time of a prompt's KV over each link, in the simulator's link model; "
        "dots are the article's times for 256 MiB. Line rates: real transports reach 0.65 to 0.9.",
        notes=(
            "The article's sizes fit Llama-3-8B (8 KV heads), not a multi-head 7B, whose KV is "
            "four times as large.",
            *(f"{claim.what}: {claim.why}." for claim in SEED_TIMES if claim.why),
        ),
    )


def _seed_sizes(source: str) -> list[Row]:
    llama8, llama7, llama70 = (MODELS[name] for name in ("llama3-8b", "llama2-7b", "llama3-70b"))
    big = llama70.kv_token_bytes() * 32768 / GIB
    return [
        near(
            "KV per token and layer (Llama-3-8B)", 4096, llama8.kv_token_bytes() / llama8.L,
            within=0, source=source, unit="B",
        ),
        near(
            "2048 tokens, one layer", 8, 2048 * llama8.kv_token_bytes() / llama8.L / MIB,
            within=0, source=source, unit="MiB",
        ),
        near(
            "2048 tokens, all 32 layers", 256, 2048 * llama8.kv_token_bytes() / MIB,
            within=0, source=source, unit="MiB",
        ),
        near(
            "the same of `a 7B` with multi-head attention", 256,
            2048 * llama7.kv_token_bytes() / MIB, within=0.1, source=source, unit="MiB",
        ),
        judged(
            "70B at 32K tokens", "> 8", big, big > 8, criterion="above", source=source, unit="GiB",
        ),
        near(
            "2048 tokens of a multi-head 7B, `per request`", 33.6,
            2048 * llama7.kv_token_bytes() / 1e6, within=0.1,
            source="article on the architecture of PD (its product lacks the 32 layers)",
            unit="MB",
        ),
    ]  # fmt: skip


def _seed_figure() -> Figure:
    figure = Figure(figsize=(WIDTH, 3.4))
    axes = figure.subplots()
    tokens = [128 * 2**i for i in range(9)]
    mib = [MODELS["llama3-8b"].kv_token_bytes() * n / MIB for n in tokens]
    for i, claim in enumerate(SEED_TIMES):
        ms = [1e3 * seconds_on(claim.link, round(size * MIB)) for size in mib]
        colour = PLACEMENT_COLOURS[i]
        axes.loglog(mib, ms, color=colour, linestyle=LINE_STYLES[i], label=claim.what)
        marker = "^" if claim.at_least else "o"
        axes.plot(SEED_BYTES / MIB, claim.ms, marker, color=colour)
    axes.set(xlabel="KV (MiB; 1 MiB is 8 tokens of Llama-3-8B)", ylabel="transfer (ms)")
    log_ticks(axes.yaxis)
    axes.legend()
    return figure
