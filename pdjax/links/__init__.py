"""Links between instances: how fast they are, what shares them, and how. There is no clock here."""

from pdjax.links.network import NEVER, Crossed, Network
from pdjax.links.sharing import End, max_min, one_at_a_time
from pdjax.links.speeds import PRESETS, Speed, resolve
from pdjax.links.topology import NANOSECONDS

__all__ = [
    "NANOSECONDS",
    "NEVER",
    "PRESETS",
    "Crossed",
    "End",
    "Network",
    "Speed",
    "max_min",
    "one_at_a_time",
    "resolve",
]
