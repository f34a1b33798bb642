"""Chips and models against what was published about them, not against their own arithmetic."""

import pytest

from pdjax.architecture import TINY
from pdjax.catalogue import CHIPS, LINKS, MODELS, CatalogueError, chip, link, model, shape_of
from pdjax.links import Network

# Parameters in the published checkpoints: model cards and safetensors indices; OPT's tables and
# DeepSeek's paper round.
PARAMETERS = {
    "opt-13b": 12_853_473_280,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "bloom-176b": 176_247_271_424,
    "deepseek-v3": 671_026_419_200,
}
ROUNDED = {"opt-66b": 66e9, "opt-175b": 175e9}

# KiB per token in bf16, from the papers and the public calculators that cite them.
KV_KIB = {
    "opt-13b": 800,
    "opt-66b": 2304,
    "opt-175b": 4608,
    "llama2-7b": 512,
    "llama2-13b": 800,
    "llama2-70b": 320,
    "llama3-8b": 128,
    "llama3-70b": 320,
    "qwen3-8b": 144,
    "qwen3-32b": 256,
    "bloom-176b": 3920,
    "deepseek-v3": 68.625,  # 70,272 bytes
}


def test_every_model_has_its_published_number_of_parameters():
    assert PARAMETERS.keys() | ROUNDED.keys() == MODELS.keys()
    assert {name: model(name).parameters for name in PARAMETERS} == PARAMETERS
    for name, published in ROUNDED.items():
        assert model(name).parameters == pytest.approx(published, rel=0.01)


def test_every_model_has_its_published_bytes_of_kv_per_token():
    assert {name: shape.kv_token_bytes() / 1024 for name, shape in MODELS.items()} == KV_KIB


def test_512_tokens_of_opt_66b_are_1_13_gib_as_distserve_says():
    assert 512 * model("opt-66b").kv_token_bytes() / 2**30 == pytest.approx(1.13, abs=0.005)


def test_deepseek_v3_activates_37_billion_parameters():
    """As its abstract says; embeddings, of which a token reads one row, are in that number."""
    shape = model("deepseek-v3")
    active = shape.active_weights + 2 * shape.V * shape.D
    assert active == pytest.approx(37e9, rel=0.02)


def test_one_token_reads_the_active_experts_and_many_read_all():
    shape = model("deepseek-v3")
    one = shape.read_weights(1)
    assert one == shape.active_weights + shape.head_weights
    everything = shape.parameters - shape.V * shape.D - shape.L * shape.vectors - shape.extra
    assert shape.read_weights(10_000) == pytest.approx(everything, rel=1e-9)
    # 32 tokens choose 8 of 256: (1 - 8/256)^32 = 0.362 of the experts rest.
    assert shape.experts.met(32) == pytest.approx(256 * (1 - 0.3621), rel=1e-3)


def test_attention_counts_each_pair_of_a_token_and_what_it_sees_once():
    heads = shape_of(TINY, "here").attention  # N = 8, H = 16
    per_pair = 4 * 8 * 16
    assert heads.chunk_flops(0, 3) == per_pair * (1 + 2 + 3)
    assert heads.chunk_flops(5, 2) == per_pair * (6 + 7)
    assert heads.chunk_flops(0, 9) == heads.chunk_flops(0, 4) + heads.chunk_flops(4, 5)
    assert heads.decode_flops(10) == heads.chunk_flops(9, 1)


def test_latent_attention_decodes_on_latents_and_unfolds_the_cache_for_a_chunk():
    latent = model("deepseek-v3").attention
    assert latent.decode_flops(1) == 128 * (2 * (512 + 64) + 2 * 512)  # scores, then values
    pair = 128 * (2 * (128 + 64) + 2 * 128)
    unfolding = 2 * 512 * 128 * (128 + 128)
    assert latent.chunk_flops(0, 2) == 3 * pair
    assert latent.chunk_flops(7, 1) == 8 * pair + 7 * unfolding


def test_ridge_points_are_those_of_the_makers_numbers():
    ridges = {"a100-80g": 153, "h100": 295, "h200": 206, "l40s": 419, "v5e": 240, "v5p": 166}
    ridges["v6e"] = 560
    assert {name: chip(name).ridge for name in ridges} == pytest.approx(ridges, rel=0.005)


def test_no_chip_has_sparse_flops_or_both_ways_of_a_link():
    """A dense H100 computes 3.17 times as much as a dense A100; sparse figures of one of them would
    double or halve that. NVLink 4 is 900 GB/s both ways."""
    assert chip("h100").flops / chip("a100-80g").flops == pytest.approx(3.17, abs=0.01)
    assert chip("h100").link_bytes_per_s == 450e9
    assert chip("l40s").flops < 400e12 and chip("b200").flops < 2500e12


def test_all_chips_links_and_models_name_their_source():
    every = (*CHIPS.values(), *LINKS.values(), *MODELS.values())
    assert all(len(it.source) > 10 for it in every)


def test_links_of_simulators_say_how_transfers_meet_in_them():
    """Splitwise's gives each transfer a link of its own, at ten times the speed where KV is said to
    leave during the prompt; 100 GiB take half a second, and a twentieth."""
    for name, seconds in (("splitwise-sim", 0.5), ("splitwise-sim-overlapped", 0.05)):
        network = Network(link(name))
        for id in range(3):
            network.start(0, id, "p", "d", 100 * 2**30)
        assert network.next_finish() == seconds * 1e9
        assert len(network.finish(network.next_finish())) == 3
    network = Network(link("splitwise-sim-queued"))
    for id in range(3):
        network.start(0, id, f"p{id}", "d", 100 * 2**30)
    assert len(network.finish(10**9)) == 2 and network.next_finish() == 1.5e9


@pytest.mark.parametrize("find", [chip, model])
def test_an_unknown_name_is_refused_with_those_there_are(find):
    name, near = ("h10", "h100") if find is chip else ("llama3-8", "llama3-8b")
    with pytest.raises(
        CatalogueError, match=rf"no \w+ `{name}`; did you mean `{near}`\?.*, "
    ) as it:
        find(name)
    assert "\n" not in str(it.value)
