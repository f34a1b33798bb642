"""One cost of a whole placement, whose roles may differ in chip, tp or model of cost."""

from collections.abc import Mapping, Sequence

import numpy as np

from pdjax.core.config import Link, role_of
from pdjax.core.events import Send, Step
from pdjax.cost import Cost
from pdjax.costs.batch import CostError


def per_role(costs: Mapping[str, Cost], link: Link) -> Cost:
    """Steps and pieces last as the cost of their role says; a piece has its source's size.

    Raises CostError, when asked, for a step of a role that has no cost.
    """

    def cost_of(instance: str) -> Cost:
        role = role_of(instance.removesuffix(".host"))
        if role not in costs:
            raise CostError(f"no cost for the role `{role}`; there are {', '.join(costs)}")
        return costs[role]

    def step_ns(step: Step) -> int:
        return cost_of(step.instance).step_ns(step)

    def send_bytes(send: Send) -> int:
        return cost_of(send.source).send_bytes(send)

    def decode_ns(step: Step) -> Sequence[int] | np.ndarray:
        return cost_of(step.instance).iterations_ns(step)

    return Cost(step_ns, send_bytes, link, decode_ns)
