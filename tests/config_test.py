"""A config that cannot be served is refused with the values that clash; every shipped one loads."""

from pathlib import Path

import pytest

from experiments.flags import load
from pdjax.core.config import (
    Cache,
    Config,
    ConfigError,
    Fault,
    Link,
    Model,
    Placement,
    Pool,
    Recovery,
    Role,
    Transfer,
)

P, D, BOTH = Role(does="prefill"), Role(does="decode"), Role(does="both")


def beside(host: str, **changes) -> Role:
    return Role(does="decode", beside=host, **changes)


@pytest.mark.parametrize(
    "placement",
    [
        {"server": BOTH},
        {"a": BOTH, "b": BOTH},
        {"prefill": P, "decode": D},
        {"prefill": P, "decode": beside("prefill")},  # two pools on one mesh
        {"prefill": P, "decode": beside("prefill", pool_of="prefill")},  # one pool
        {"prefill": Role(does="prefill", instances=2, tp=4), "decode": D},
        {"prefill": P, "decode": Role(does="decode", pool=Pool(page_size=3))},  # has no chunks
    ],
)
def test_a_placement_that_can_serve_is_accepted(placement: Placement):
    assert Config(placements={"it": placement}).placements["it"] == placement


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ({"d": D}, "placement `it` has no role that does `prefill` or `both`"),
        ({"p": P}, "placement `it` has no role that does `decode` or `both`"),
        ({}, "has no role"),
        ({"p": P, "d": D, "b": BOTH}, "mixes roles that do `both`"),
        ({"p": P, "d": beside("q")}, r"role `d`: `beside` names `q`; other roles are \['p'\]"),
        ({"p": P, "d": beside("d")}, r"`beside` names `d`; other roles are \['p'\]"),
        # a chain: e sits beside d, which sits beside p
        ({"p": P, "d": beside("p"), "e": beside("d")}, "`d`, which itself is beside another role"),
        ({"p": P, "d": beside("p", tp=2)}, r"\(tp, instances\) \(2, 1\), not \(1, 1\)"),
        ({"p": P, "d": beside("p", instances=3)}, r"\(1, 3\), not \(1, 1\)"),
        (
            {"p": P, "d": Role(does="decode", pool_of="p")},
            "`beside` is ``; one pool needs one mesh",
        ),
        ({"b": Role(chunk=100)}, "`chunk` 100 is not a multiple of `pool.page_size` 16"),
        # the pool that counts is the one that is used
        (
            {
                "d": Role(does="decode", pool=Pool(tokens=96, page_size=24)),
                "p": Role(does="prefill", chunk=16, beside="d", pool_of="d"),
            },
            "role `p`: `chunk` 16 is not a multiple of `pool.page_size` 24",
        ),
    ],
)
def test_a_placement_that_cannot_serve_is_refused(placement: Placement, message: str):
    with pytest.raises(ConfigError, match=message):
        Config(placements={"it": placement})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Config(placements={}), "`placements` is empty"),
        (lambda: Model(context=0), "`model.context` is 0"),
        (lambda: Pool(tokens=8, page_size=16), "a pool of 8 tokens does not hold one page of 16"),
        (lambda: Pool(page_size=0), "`pool.page_size` > 0"),
        (lambda: Transfer(groups=0), "`transfer.groups` is 0"),
        (lambda: Role(slots=0), "`slots` of a role is 0"),
        (lambda: Role(instances=0), "`instances` of a role is 0"),
        (lambda: Role(lag=2), "`lag` of a role is 2"),
        (lambda: Role(does="decode", mixed=True), "`mixed` needs a role that does `both`"),
        (lambda: Role(growth=-1), "`growth` of a role is -1"),
        (lambda: Role(preempt="swap"), "set `swap_tokens`"),
        (lambda: Pool(page_size=8, classes=(8, 20)), "let each size divide the next"),
        (lambda: Pool("slab", page_size=8, classes=(8, 16)), "of a pool of slab"),
        (lambda: Transfer(credits=-1), "`transfer.credits` is -1"),
        (lambda: Transfer(initiator="pull"), "is `layerwise`, which sends it earlier: set it to"),
        (lambda: Link(latency_s=-1), "must be at least 0"),
        (lambda: Cache(block=0), "`cache.block` is 0"),
        (lambda: Recovery(attempts=0), "`recovery.attempts` is 0"),
        (lambda: Fault("kill"), "name one for `stall` and `kill` only"),
        (lambda: Fault("drop", at=0), "it counts from 1"),
    ],
)
def test_a_value_out_of_range_is_named(build, message: str):
    with pytest.raises(ConfigError, match=message):
        build()


SERVER = {"it": {"server": Role()}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache": Cache(prefix=True, block=24)}, "`cache.block` 24 is not a multiple"),
        ({"faults": (Fault("drop"),)}, "set `recovery.lease_s`"),
        ({"faults": (Fault("stall", instance="server/0"),)}, "set `recovery.lease_s`"),
        ({"faults": (Fault("delay"), Fault("duplicate"))}, "befall the same landing"),
    ],
)
def test_values_that_clash_are_named(changes, message: str):
    with pytest.raises(ConfigError, match=message):
        Config(placements=SERVER, **changes)


CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("[!_]*.py"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_loads_under_its_own_name_and_fits_eight_devices(path: Path):
    config = load(str(path))
    assert config.name == path.stem
    for placement in config.placements.values():
        devices = sum(r.instances * r.tp for r in placement.values() if not r.beside)
        assert devices <= 8


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_says_how_to_run_it(path: Path):
    assert f"--config=configs/{path.name}" in path.read_text().split('"""')[1]
