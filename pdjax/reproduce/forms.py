"""Four forms of KV memory for one device, as an article on the architecture of PD tells of them."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from pdjax.catalogue import CHIPS, MODELS
from pdjax.core.config import Config, Link, Placement
from pdjax.cost import Cost
from pdjax.costs.batch import send_bytes_of
from pdjax.costs.placement import per_role
from pdjax.costs.roofline import Roofline, on_chip, roofline
from pdjax.metrics import analyse, summary
from pdjax.processors import Sharing
from pdjax.report_style import PLACEMENT_COLOURS, WIDTH
from pdjax.reproduce.result import Reproduction, Row, drawn, judged
from pdjax.sim import simulate
from pdjax.workload import make_source

SOURCE = "article on the architecture of PD, table for batch 8 (it names no source)"


class Numbers(NamedTuple):
    """ttft_s, tpot_s: medians. gb: weights and KV held, in the mean."""

    ttft_s: float
    tpot_s: float
    requests_per_s: float
    gb: float


LABELS = ("TTFT", "TPOT", "requests/s", "memory")
CLAIMED = {
    "native": Numbers(0.940, 0.022, 32, 14.2),
    "logical_split": Numbers(0.610, 0.023, 48, 14.0),
    "two_pools": Numbers(0.420, 0.019, 78, 12.1),
    "page_classes": Numbers(0.390, 0.017, 85, 11.8),
}
BATCH = 8
SAME = 0.05
"""Numbers whose ratio is within this of 1 are about the same."""
SHARES = {"free": Sharing(speed=1.0), "shared": Sharing(speed=0.5)}
"""How steps of prefill and decode that run together on one device slow each other down: not at all
(which flatters separation), or to half of their speed (as if neither left anything unused)."""
CHIP, SHAPE = CHIPS["a10"], MODELS["llama2-7b"]


def pool_forms(config: Config) -> Reproduction:
    """The table's four forms by simulation of a 7B on an A10: does each number go the same way?

    config: has placements named as in CLAIMED, all on one device.
    """
    found = {
        name: {form: _served(config, form, sharing) for form in CLAIMED}
        for name, sharing in SHARES.items()
    }
    return Reproduction(
        title="Four forms of KV memory on an A10 with a 7B: directions of a table",
        samples=f"{config.workload.requests} requests per form, one seed",
        rows=(*_direction_rows(found), *_possible_rows()),
        figure=drawn(lambda: _figure(found)),
        caption="Each number against `native`, in the article (grey) and simulated where prefill "
        "and decode do not slow each other (blue) and where, running together, they share the "
        "device (orange). The truth lies between the two.",
        notes=(
            "The article states neither prompts nor outputs nor load: here "
            f"requests of {config.workload.arrivals.concurrency} clients, whose prompts and "
            "outputs are those of configs/pool_forms.py. Llama-2-7B in bf16, A10 at 50 % of peak "
            "FLOP/s (as AIConfigurator gives an L40S).",
            "Memory is 13.5 GB of weights and the KV that requests hold.",
        ),
    )


def _served(config: Config, name: str, sharing: Sharing) -> Numbers:
    placement, workload = config.placements[name], config.workload
    source = make_source(
        workload, config.seed, encode=None, vocab=1, context=config.model.context, eos=()
    )
    # On a device of its own KV is copied by the memory, in and out.
    link = Link(bytes_per_s=CHIP.hbm_bytes_per_s / 2)
    cost = _cost(placement, sharing, link)
    config = replace(config, transfer=replace(config.transfer, link=link))
    run = analyse(list(simulate(config, name, source, cost)), placement, config.slo)
    held_gb = (summary(run)["kv_held_tokens_mean"] or 0) * SHAPE.kv_token_bytes() / 1e9
    return Numbers(
        float(np.median(run.requests["ttft_s"])),
        float(np.nanmedian(run.requests["tpot_s"])),
        len(run.requests) / run.makespan_s,
        held_gb + 2 * SHAPE.parameters / 1e9,
    )


def _cost(placement: Placement, sharing: Sharing, link: Link) -> Cost:
    coefficients = on_chip(CHIP, compute=0.5, weights=0.71, kv=0.53)
    model = Roofline(name=CHIP.name, coefficients=coefficients)
    cost = roofline(model, SHAPE, link, send_bytes_of(SHAPE))
    return per_role(dict.fromkeys(placement, cost), link)._replace(sharing=sharing)


def direction(ratio: float) -> str:
    if abs(ratio - 1) <= SAME:
        return "same"
    return "higher" if ratio > 1 else "lower"


def ratios(numbers: Mapping[str, Numbers], form: str) -> list[float]:
    """Of a form to `native`, by LABELS."""
    return [a / b for a, b in zip(numbers[form], numbers["native"], strict=True)]


def _direction_rows(found: Mapping[str, Mapping[str, Numbers]]) -> Iterator[Row]:
    """A number is as claimed where both ways to share a device move it as the article says, and not
    so where neither does."""
    for form in list(CLAIMED)[1:]:
        ours = zip(*(ratios(numbers, form) for numbers in found.values()), strict=True)
        for label, claimed, seen in zip(LABELS, ratios(CLAIMED, form), ours, strict=True):
            agree = {direction(ratio) == direction(claimed) for ratio in seen}
            yield judged(
                f"{form}: {label} against native",
                f"x{claimed:.2f}",
                " to ".join(f"x{ratio:.2f}" for ratio in seen),
                agree.pop() if len(agree) == 1 else None,
                criterion=f"{direction(claimed)}, however the device is shared",
                source=SOURCE,
            )


def _possible_rows() -> Iterator[Row]:
    """What the table's numbers say of each other, and of the device."""
    read_s = 2 * SHAPE.parameters / CHIP.hbm_bytes_per_s
    for form, numbers in CLAIMED.items():
        e2e_s = BATCH / numbers.requests_per_s
        yield judged(
            f"{form}: {BATCH} requests at {numbers.requests_per_s:g}/s take {e2e_s:.2f} s each",
            f"TTFT {numbers.ttft_s:g} s",
            f"E2E {e2e_s:.2f} s",
            e2e_s >= numbers.ttft_s,
            criterion="E2E at least TTFT (Little's law)",
            source=SOURCE,
        )
        yield judged(
            f"{form}: TPOT",
            numbers.tpot_s * 1e3,
            f">= {read_s * 1e3:.1f}",
            numbers.tpot_s >= (1 - SAME) * read_s,
            criterion="no less than 5 % below reading the weights at 600 GB/s",
            source=SOURCE,
            unit="ms",
        )


def _figure(found: Mapping[str, Mapping[str, Numbers]]) -> Figure:
    figure = Figure(figsize=(WIDTH, 3.4))
    panels = figure.subplots(1, len(LABELS))
    forms = list(CLAIMED)[1:]
    shown: dict[str, tuple[Mapping[str, Numbers], str]] = {"article": (CLAIMED, "#bbbbbb")}
    for (sharing, numbers), colour in zip(found.items(), PLACEMENT_COLOURS, strict=False):
        shown[f"device {sharing}"] = (numbers, colour)
    for i, (label, axes) in enumerate(zip(LABELS, panels, strict=True)):
        for j, (numbers, colour) in enumerate(shown.values()):
            heights = [ratios(numbers, form)[i] for form in forms]
            axes.bar(np.arange(len(forms)) + 0.27 * (j - 1), heights, 0.25, color=colour)
        axes.axhline(1, color="#555555", linestyle=":")
        axes.set_xticks(range(len(forms)), [form.replace("_", "\n") for form in forms])
        axes.set_title(label)
    panels[0].set_ylabel("x native")
    figure.legend(
        handles=[Patch(color=colour, label=name) for name, (_, colour) in shown.items()],
        loc="outside upper right",
        ncols=len(shown),
    )
    return figure
