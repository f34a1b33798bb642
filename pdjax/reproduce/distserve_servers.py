"""DistServe's servers and its vLLM baseline (Zhong et al., OSDI 2024), in virtual time.

Iteration times are the authors' own fits. `Mode` says what is simulated around them: the servers
that the paper describes, or what the authors' simulator (simdistserve) makes of them.
"""

import functools
from typing import Literal, NamedTuple

import numpy as np

from pdjax.catalogue import chip, model
from pdjax.core.config import SLO, Config, Link, Model, Pool, Role, Transfer
from pdjax.core.events import Step
from pdjax.cost import Cost, cached_of
from pdjax.costs.batch import batches, send_bytes_of
from pdjax.costs.distserve import KV_TOKENS, distserve
from pdjax.costs.placement import per_role
from pdjax.metrics import Outcomes, outcomes
from pdjax.reproduce.served import Draw, crossing, poisson
from pdjax.sim import simulate

TARGET = 0.9
OVERHEAD_NS, OVERHEAD_TOKEN_NS = 2_000_000, 100
"""Of one iteration, and of each token that its requests have: simdistserve's `add_ray_overhead`."""
CONTEXT = 2048

Does = Literal["prefill", "decode", "both"]
Mode = Literal["server", "simdistserve"]
"""`server`: the batch limits and KV memory of the paper's servers; a hand-off crosses NVLink; a
decode instance takes blocks as outputs grow and swaps the youngest out. `simdistserve`: memory has
no end, hand-offs take no time, a prefill batch has up to 50,000 tokens, and a request decodes
once more than it has output tokens. (Where the decodes of an iteration have more than 50,000 tokens
of context, the real simdistserve lets them take turns; that is left out.)"""


class Deployment(NamedTuple):
    """(tp, pipeline stages) of the prefill and of the decode instance; of the only one where there
    is no `decode`. engine: whose fits."""

    engine: Literal["distserve", "vllm"]
    prefill: tuple[int, int]
    decode: tuple[int, int] | None = None

    @property
    def gpus(self) -> int:
        return sum(tp * pp for tp, pp in filter(None, (self.prefill, self.decode)))


class Case(NamedTuple):
    """A panel: requests of these lengths for a model, at rates per GPU, `per_gpu` requests each."""

    name: str
    model: str
    draw: Draw
    slo: SLO
    rates: tuple[float, ...]
    per_gpu: int


def serve(
    case: Case, deployment: Deployment, rate: float, n: int, seed: int, mode: Mode = "server"
) -> Outcomes:
    """What becomes of `n` requests at `rate` per GPU."""
    config, cost = _server(case.model, deployment, mode)
    draw = case.draw if mode == "server" else _once_more(case.draw)
    source = poisson(draw, n, rate * deployment.gpus, seed)
    return outcomes(simulate(config, "it", source, cost))


def attained(
    case: Case, deployment: Deployment, rate: float, n: int, seed: int, mode: Mode = "server"
) -> float:
    """The share of `n` requests at `rate` per GPU that are within both SLOs."""
    return float(serve(case, deployment, rate, n, seed, mode).attained(case.slo).mean())


def crossing_of(
    case: Case, deployment: Deployment, n: int, seed: int, mode: Mode = "server"
) -> float:
    """The rate per GPU at which one run of `n` requests crosses the target; rates beyond are not
    served."""
    shares: list[float] = []
    for rate in case.rates:
        shares.append(attained(case, deployment, rate, n, seed, mode))
        if shares[-1] < TARGET:
            break
    return crossing(case.rates[: len(shares)], shares, TARGET)


def _once_more(draw: Draw) -> Draw:
    return lambda rng, n: draw(rng, n) + np.array([0, 1])


@functools.cache
def _server(name: str, deployment: Deployment, mode: Mode) -> tuple[Config, Cost]:
    """The placement `it` and its cost. Pipeline stages hold as many batches in flight: here they
    are as many instances, each as slow as the whole pipeline and with its share of the memory."""
    link = Link() if mode == "simdistserve" else Link(bytes_per_s=chip("a100-80g").link_bytes_per_s)
    parts: dict[Does, tuple[int, int]] = {"both": deployment.prefill}
    if deployment.decode is not None:
        parts = {"prefill": deployment.prefill, "decode": deployment.decode}
    roles: dict[str, Role] = {}
    costs: dict[str, Cost] = {}
    for does, part in parts.items():
        roles[does] = _role(does, name, part, mode)
        fitted = distserve(
            name, part[0], link, send_bytes_of(model(name)), engine=deployment.engine
        )
        costs[does] = _with_overhead(fitted)
    config = Config(
        placements={"it": roles},
        model=Model(context=CONTEXT + 1),
        transfer=Transfer(schedule="whole", link=link),
    )
    return config, per_role(costs, link)


BATCH_TOKENS: dict[Does, int] = {"prefill": 8192, "both": 16_384, "decode": 8192}
BATCH_REQUESTS: dict[Does, int] = {"prefill": 128, "both": 1024, "decode": 1024}
SWAP_BYTES = 16e9
"""Of a decode instance, in host memory: all of evaluation/'s servers (commit 82831f1)."""
PEER_BATCH_TOKENS = 50_000


def _role(does: Does, name: str, part: tuple[int, int], mode: Mode) -> Role:
    tp, pp = part
    if mode == "simdistserve":
        pool = Pool(tokens=10_000_000, page_size=500)
        return Role(
            does=does, instances=pp, tp=tp, pool=pool,
            chunk=PEER_BATCH_TOKENS, prefills=10_000, slots=10_000,
        )  # fmt: skip
    swap_tokens = round(SWAP_BYTES / model(name).kv_token_bytes())
    return Role(
        does=does, instances=pp, tp=tp, pool=Pool(tokens=KV_TOKENS[name, tp, pp] // pp),
        chunk=BATCH_TOKENS[does], prefills=BATCH_REQUESTS[does], slots=BATCH_REQUESTS[does],
        growth=0 if does == "prefill" else 16, preempt="swap" if does == "decode" else "recompute",
        swap_tokens=swap_tokens,
    )  # fmt: skip


def _with_overhead(cost: Cost) -> Cost:
    def step_ns(step: Step) -> int:
        tokens = [b.prompt_tokens + b.context - b.decodes for b in batches(step)]
        overhead = sum(OVERHEAD_NS + OVERHEAD_TOKEN_NS * count for count in tokens)
        return cost.step_ns(step) + overhead

    def decode_ns(step: Step) -> np.ndarray:
        _, cached = cached_of(step)
        return np.asarray(cost.iterations_ns(step)) + OVERHEAD_NS + OVERHEAD_TOKEN_NS * cached

    return Cost(step_ns, cost.send_bytes, cost.link, decode_ns)
