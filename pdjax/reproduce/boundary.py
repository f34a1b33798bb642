"""Where separating prefill from decode stops paying: prompt length, size of the model, link."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from pdjax.architecture import Architecture
from pdjax.catalogue import CHIPS, MODELS, Shape, shape_of
from pdjax.core.config import (
    SLO,
    Config,
    Lengths,
    Link,
    Model,
    Placement,
    Pool,
    Role,
    Transfer,
    Workload,
)
from pdjax.costs.batch import Batch, send_bytes_of
from pdjax.costs.roofline import Roofline, on_chip, roofline
from pdjax.goodput import goodput, simulated
from pdjax.report_style import LINE_STYLES, PLACEMENT_COLOURS, WIDTH
from pdjax.reproduce.result import Reproduction, Row, beside, drawn, judged

SOURCE = "article on PD in clusters, section on when it is not worth it (it names no source)"
CHIP = CHIPS["h100"]
OUTPUT = 128  # mean tokens
INSTANCES = 4
PAYS = 1.05
"""Goodput against the best collocated form's from which separation is said to pay."""

QWEN3_06B = shape_of(
    Architecture("qwen3-0.6b", V=151936, D=1024, F=3072, L=28, N=16, K=8, H=128, qk_norm=True,
                 tied=True),
    "Qwen3, arXiv 2505.09388, table 1; sizes: Qwen/Qwen3-0.6B config.json",
)  # fmt: skip
SIZES: Mapping[str, tuple[Shape, int]] = {
    "0.6B": (QWEN3_06B, 1),
    "8B": (MODELS["llama3-8b"], 1),
    "70B": (MODELS["llama3-70b"], 4),
}
"""Shape and tp of an instance."""
LINKS = {
    "NVLink (one node)": Link(preset="nvlink4"),
    "400 Gb/s RDMA": Link(preset="rdma-400g"),
    "10 Gb/s TCP": Link(preset="tcp-10g"),
}
PROMPTS = (128, 256, 1024, 4096, 16384)


class Cell(NamedTuple):
    """One model, prompt length and link: goodput of the best xPyD, as a multiple of the best
    collocated form's."""

    model: str
    prompt: int
    link: str
    ratio: float


def boundary(
    prompts: Sequence[int] = PROMPTS, models: Sequence[str] = tuple(SIZES), requests: int = 120
) -> Reproduction:
    """Goodput of four instances, separate over collocated, wherever the article draws its line."""
    cells = [
        cell for model in models for prompt in prompts for cell in _cells(model, prompt, requests)
    ]
    return Reproduction(
        title="Where PD stops paying: prompt length, size of the model, link",
        samples=f"{requests} requests at each rate, one seed; rates to 5 %",
        rows=tuple(_rows(cells)),
        figure=drawn(lambda: _figure(cells)),
        caption="Goodput of the best 1P3D, 2P2D or 3P1D over that of the better of two collocated "
        "forms (prompts first, or 512-token chunks beside decodes), on as many H100. Above the "
        "line separation pays.",
        notes=(
            "Simulated, Llama-3-8B and 70B and Qwen3-0.6B in bf16 on H100 by a roofline; Poisson, "
            f"prompts of one length, {OUTPUT} output tokens in the mean (lognormal). With one seed "
            "and so few requests, differences of a few percent mean nothing.",
            "Goodput: the highest rate at which 90 % of requests have their first token within 5 "
            "times the prefill alone (and no less than 0.1 s) and tokens within twice a decode "
            "step alone. Other objectives move the line. 0: a lone request is late already.",
        ),
    )


def _cells(model: str, prompt: int, requests: int) -> Iterator[Cell]:
    shape, tp = SIZES[model]
    estimate = _Estimate(shape, tp, prompt)
    collocated = max(
        estimate.goodput({"server": role}, Link(), requests) for role in estimate.collocated()
    )
    for name, link in LINKS.items():
        separate = max(
            estimate.goodput(estimate.separate(x, INSTANCES - x), link, requests)
            for x in estimate.splits()
        )
        yield Cell(model, prompt, name, separate / collocated if collocated else float("nan"))


class _Estimate(NamedTuple):
    """What is known of one model and prompt length before anything is simulated."""

    shape: Shape
    tp: int
    prompt: int

    @property
    def model(self) -> Roofline:
        return Roofline(name=CHIP.name, coefficients=on_chip(CHIP), tp=self.tp)

    def seconds(self, batch: Batch) -> float:
        return self.model.seconds(self.shape, batch)

    @property
    def prefill_s(self) -> float:
        return self.seconds(Batch(((0, self.prompt),)))

    def decode_s(self, batch: int) -> float:
        return self.seconds(Batch((), batch, batch * (self.prompt + OUTPUT // 2)))

    @property
    def slo(self) -> SLO:
        return SLO(ttft_s=max(0.1, 5 * self.prefill_s), tpot_s=2 * self.decode_s(1))

    @property
    def batch(self) -> int:
        """Requests that decode together within the objective for tokens."""
        fits = (n for n in (2**i for i in range(9)) if self.decode_s(n) <= self.slo.tpot_s)
        return max(fits, default=1)

    def splits(self) -> list[int]:
        """How many of the instances prefill: the two numbers around the one at which both sides
        are as busy; the others have a side that is idler still."""
        decode_s = OUTPUT * self.decode_s(self.batch) / self.batch
        x = INSTANCES * self.prefill_s / (self.prefill_s + decode_s)
        return sorted({min(max(int(x) + i, 1), INSTANCES - 1) for i in (0, 1)})

    def rate(self) -> float:
        """Requests per second of instances that do nothing twice: where to begin to search."""
        return INSTANCES / (self.prefill_s + OUTPUT * self.decode_s(self.batch) / self.batch)

    def pool(self) -> Pool:
        """What weights leave of 90 % of the memory."""
        left = 0.9 * CHIP.hbm_bytes * self.tp - 2 * self.shape.parameters
        return Pool(tokens=int(left / self.shape.kv_token_bytes()) // 128 * 128, page_size=128)

    def collocated(self) -> list[Role]:
        """Prompts first; and chunked, beside decodes (Sarathi-Serve's smaller budget)."""
        common = {"instances": INSTANCES, "tp": self.tp, "pool": self.pool(), "slots": 256}
        return [
            Role(chunk=16384, **common),
            Role(chunk=512, prefills=8, mixed=True, **common),
        ]

    def separate(self, x: int, y: int) -> Placement:
        common = {"tp": self.tp, "pool": self.pool()}
        return {
            "prefill": Role("prefill", instances=x, chunk=16384, **common),
            "decode": Role("decode", instances=y, slots=256, **common),
        }

    def goodput(self, placement: Placement, link: Link, requests: int) -> float:
        """Requests per second; 0 where even a lone request is late."""
        config = Config(
            placements={"it": placement},
            model=Model(context=1 << 20),
            transfer=Transfer(schedule="layerwise", groups=4, link=link),
            workload=Workload(
                requests=requests,
                prompt=Lengths(mean=self.prompt),
                output=Lengths(kind="lognormal", mean=OUTPUT, low=8, high=8 * OUTPUT),
            ),
        )
        cost = roofline(self.model, self.shape, link, send_bytes_of(self.shape))
        serve = simulated(config, "it", cost)
        return goodput(serve, self.slo, start=self.rate() / 2, seeds=(0,), tolerance=0.05).rate


def _rows(cells: Sequence[Cell]) -> Iterator[Row]:
    fast = [cell for cell in cells if not cell.link.endswith("TCP")]
    yield from _claims(
        "prompts below 256 tokens", "does not pay", [c for c in fast if c.prompt < 256], pays=False
    )
    yield from _claims(
        "models below 1B", "does not pay", [c for c in fast if c.model == "0.6B"], pays=False
    )
    yield from _claims(
        "within a node", "does not pay", [c for c in cells if "node" in c.link], pays=False
    )
    yield from _claims(
        "prompts above 8K, 7B to 70B", "pays",
        [c for c in fast if c.prompt > 8192 and c.model != "0.6B"], pays=True,
    )  # fmt: skip
    prompts = sorted({cell.prompt for cell in cells})
    for model, link in dict.fromkeys((cell.model, cell.link) for cell in cells):
        here = [cell for cell in cells if (cell.model, cell.link) == (model, link)]
        yield beside(
            f"{model}, {link}: prompts of {', '.join(map(str, prompts))}", "-",
            ", ".join(f"{cell.ratio:.2f}" for cell in here), unit="x", source="not published",
        )  # fmt: skip


def _claims(what: str, published: str, cells: Sequence[Cell], *, pays: bool) -> Iterator[Row]:
    """A row on all these cells, if there are any: it holds where all are as claimed, and does not
    where one is clearly the other way."""
    if not cells:
        return
    ratios = [cell.ratio for cell in cells]
    low, high = min(ratios), max(ratios)
    if pays:
        holds = True if low >= PAYS else False if low <= 1 / PAYS else None
        criterion = f"at least {PAYS} x everywhere"
    else:
        holds = high < PAYS
        criterion = f"less than {PAYS} x everywhere"
    yield judged(
        what, published, f"{low:.2f} to {high:.2f}", holds,
        criterion=criterion, source=SOURCE, unit="x",
    )  # fmt: skip


def _figure(cells: Sequence[Cell]) -> Figure:
    figure = Figure(figsize=(WIDTH, 3.4))
    panels = figure.subplots(1, len(LINKS), sharey=True)
    for name, axes in zip(LINKS, panels, strict=True):
        for i, model in enumerate(SIZES):
            here = [cell for cell in cells if (cell.model, cell.link) == (model, name)]
            axes.plot(
                [cell.prompt for cell in here], [cell.ratio for cell in here], marker="o",
                color=PLACEMENT_COLOURS[i], linestyle=LINE_STYLES[i], label=model,
            )  # fmt: skip
        axes.axhline(1, color="#555555", linestyle=":")
        axes.set(xscale="log", xlabel="prompt (tokens)", title=name)
    panels[0].set_ylabel("goodput, separate over collocated")
    panels[0].legend()
    return figure
