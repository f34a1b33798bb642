"""Links of published systems and of their simulators, as configs ask for them."""

from collections.abc import Mapping
from dataclasses import dataclass

from pdjax.core.link import Line, Link, Nodes

GIB = 2**30


@dataclass(frozen=True)
class PublishedLink:
    """link: what transfers of that system cross, at line rate."""

    name: str
    link: Link
    source: str


_SPLITWISE_SIM = 200 * GIB
_LINKS = (
    PublishedLink(
        "distserve",
        Link(bytes_per_s=25e9 / 8, nodes=Nodes(8, "interleaved", fabric=Line("nvlink3"))),
        "DistServe, OSDI 2024: testbed of nodes of 8 A100 with NVLink, 25 Gb/s between them, where "
        "KV stays in a node (the low-affinity placement)",
    ),
    PublishedLink(
        "mooncake",
        Link(bytes_per_s=25e9, nodes=Nodes(8, fabric=Line(bytes_per_s=200e9), nics=4)),
        "Mooncake, FAST 2025: testbed of nodes of 8 A800 (NVLink of 400 GB/s both ways) with 4 "
        "NICs of 200 Gb/s",
    ),
    PublishedLink(
        "splitwise",
        Link(bytes_per_s=200e9 / 8, nodes=Nodes(8, fabric=Line("nvlink3"))),
        "Splitwise, ISCA 2024: DGX-A100 machines on InfiniBand, 200 Gb/s",
    ),
    PublishedLink(
        "splitwise-sim",
        Link(bytes_per_s=_SPLITWISE_SIM, sharing="exclusive"),
        "Mutinifni/splitwise-sim, commit 8f99e7d, scheduler.py: each transfer has a link of its "
        "own, of 200 * 1024**3 bytes/s where the paper has 200 Gb/s",
    ),
    PublishedLink(
        "splitwise-sim-overlapped",
        Link(bytes_per_s=10 * _SPLITWISE_SIM, sharing="exclusive"),
        "the same, its Overlap schedulers: ten times the bandwidth stands for KV that leaves while "
        "the prompt is computed, of which a tenth is still to come at its end",
    ),
    PublishedLink(
        "splitwise-sim-queued",
        Link(bytes_per_s=_SPLITWISE_SIM, sharing="one_at_a_time"),
        "the same, its interconnect.py: one transfer has a link whole and the others queue; its "
        "schedulers do not use such links",
    ),
    PublishedLink(
        "simdistserve",
        Link(),
        "LLMServe/DistServe, commit 82831f1, simdistserve: transfers take no time",
    ),
    PublishedLink(
        "dynamo-mocker",
        Link(bytes_per_s=64e9, sharing="exclusive"),
        "ai-dynamo/dynamo, its mocker: a transfer takes its bytes over 64 GB/s, whatever others do",
    ),
)
LINKS: Mapping[str, PublishedLink] = {link.name: link for link in _LINKS}
