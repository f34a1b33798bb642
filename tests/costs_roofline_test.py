"""The roofline by hand, against other people's numbers, and fitted to what it made itself."""

import random
from statistics import fmean

import msgspec
import pytest
from costs_helpers import LINK, decode, ms, no_bytes, prefill
from hypothesis import given
from hypothesis import strategies as st

from pdjax.architecture import TINY
from pdjax.catalogue import chip, model, shape_of
from pdjax.costs.batch import Batch, CostError
from pdjax.costs.domain import OutsideDomain, domain_of
from pdjax.costs.roofline import (
    Coefficients,
    Padding,
    Roofline,
    fit,
    on_chip,
    read_roofline,
    roofline,
)
from pdjax.costs.work import work_of

LLAMA = model("llama3-8b")
TOY = shape_of(TINY, "here")  # V 256, D 64, F 128, L 4, N 8, K 4, H 16
LAYERS = 4 * (2 * 64 * 16 * (8 + 4) + 3 * 64 * 128)  # weights in matrices of the toy's layers
HEAD = 256 * 64


def batch(*contexts: int) -> Batch:
    return Batch((), len(contexts), sum(contexts))


def test_work_of_a_chunk_by_hand():
    work = work_of(TOY, Batch(((6, 5),)), weight_bytes=4)
    assert work.flops == 2 * (5 * LAYERS + HEAD)  # logits of one row
    assert work.weight_bytes == 4 * (LAYERS + HEAD)
    assert work.attention_flops == 4 * 4 * 8 * 16 * (7 + 8 + 9 + 10 + 11)
    assert work.kv_bytes == 6 * 4 * 2 * 4 * 16 * 2  # tokens, layers, K and V, K, H, bf16
    assert (work.requests, work.layers, work.comm_bytes, work.allreduces) == (1, 4, 0, 0)


def test_work_of_decodes_by_hand():
    work = work_of(TOY, batch(10, 20))
    assert work.flops == 2 * 2 * (LAYERS + HEAD)
    assert work.attention_flops == 4 * 4 * 8 * 16 * 30
    assert work.kv_bytes == 30 * 4 * 2 * 4 * 16 * 2


def test_chips_divide_all_but_copied_heads_and_add_all_reduces():
    one, eight = (work_of(TOY, batch(10, 20), tp=tp) for tp in (1, 8))
    assert (eight.flops, eight.weight_bytes) == (one.flops / 8, one.weight_bytes / 8)
    assert eight.kv_bytes == one.kv_bytes / 4  # 4 kv heads on 8 chips: two have the same
    assert eight.allreduces == 8
    assert eight.comm_bytes == 8 * (2 * 7 / 8) * 2 * 64 * 2  # per all-reduce: 2 tokens of D in bf16
    latent = model("deepseek-v3")
    assert work_of(latent, batch(9), tp=8).kv_bytes == work_of(latent, batch(9)).kv_bytes


def test_padding_multiplies_rows_but_reads_what_is_there():
    padding = Padding(buckets=(16, 32), slots=8)
    padded = work_of(TOY, Batch(((0, 17), (0, 40)), 2, 30), rows_of=padding.rows)
    assert padded.flops == 2 * ((32 + 40 + 8) * LAYERS + (2 + 8) * HEAD)
    assert padded.kv_bytes == work_of(TOY, batch(10, 20)).kv_bytes
    assert padding.rows(Batch(((0, 16),))) == (16, 1)
    assert Padding(slots=8, mixed=True).rows(Batch(((0, 16),))) == (24, 9)


def test_seconds_are_the_formula_by_hand():
    rates = Coefficients(
        step_s=1.0, layer_s=0.1, request_s=0.01, flop_s=0.5, weight_byte_s=3.0,
        attention_flop_s=5.0, kv_byte_s=7.0, comm_byte_s=11.0, allreduce_s=13.0,
    )  # fmt: skip
    work = work_of(TOY, batch(10, 20), tp=2)
    others = 1.4 + 0.02 + 5 * work.attention_flops + 7 * work.kv_bytes
    others += 11 * work.comm_bytes + 13 * 8
    assert rates.seconds(work) == pytest.approx(others + 3 * work.weight_bytes)
    work = work._replace(weight_bytes=work.flops / 8)
    assert rates.seconds(work) == pytest.approx(others + 0.5 * work.flops)


@pytest.mark.parametrize(
    ("name", "tokens", "mfu"),
    [("h100", 2048, 0.74), ("h200", 2048, 0.74), ("h100", 8192, 0.71), ("h100", 512, 0.65)],
)
def test_prefill_on_hopper_is_near_aiconfigurators_kernel_tables(name, tokens, mfu):
    """Llama-3-8B, tp 1. Their FLOPs are those of all parameters and of attention."""
    work = work_of(LLAMA, Batch(((0, tokens),)))
    seconds = on_chip(chip(name)).seconds(work)
    useful = 2 * LLAMA.parameters * tokens + work.attention_flops
    assert useful / seconds / chip(name).flops == pytest.approx(mfu, abs=0.06)


@pytest.mark.parametrize(("requests", "milliseconds"), [(1, 6.2), (32, 8.3), (128, 12.8)])
def test_decode_on_h100_is_near_aiconfigurators_kernel_tables(requests, milliseconds):
    """Theirs are sums of kernels, without what an engine adds."""
    seconds = on_chip(chip("h100")).seconds(work_of(LLAMA, batch(*[1024] * requests)))
    assert milliseconds < 1e3 * seconds < 1.45 * milliseconds


SIZES = st.tuples(st.integers(0, 8000), st.integers(1, 4000))


@given(
    st.lists(SIZES, max_size=3), st.lists(st.integers(1, 9000), max_size=40),
    SIZES, st.integers(1, 9000), st.sampled_from(["llama3-8b", "deepseek-v3"]),
)  # fmt: skip
def test_more_work_never_takes_less_time(chunks, contexts, chunk, context, name):
    shape, rates = model(name), on_chip(chip("h100"))

    def seconds(chunks: list, contexts: list) -> float:
        it = Batch(tuple(chunks), len(contexts), sum(contexts))
        return rates.seconds(work_of(shape, it, tp=4))

    less = seconds(chunks, contexts)
    assert less <= seconds([*chunks, chunk], contexts)
    assert less <= seconds(chunks, [*contexts, context])


# --- The fit -----------------------------------------------------------------------------

BATCHES = [
    *(Batch(((0, n),)) for n in (16, 64, 128, 256, 512, 1024, 2048, 8192)),
    *(Batch(((start, 512),)) for start in (512, 2048, 8192)),
    *(batch(*[c] * n) for n in (1, 4, 16, 64, 256) for c in (128, 1024, 8192)),
]
HIDDEN = Coefficients(
    step_s=1e-3, request_s=4e-6, flop_s=1 / 700e12, weight_byte_s=1 / 2.4e12,
    attention_flop_s=1 / 350e12, kv_byte_s=1 / 1.8e12,
)  # fmt: skip


def test_a_fit_recovers_the_coefficients_that_made_the_times():
    works = [work_of(LLAMA, it) for it in BATCHES]
    found = fit(works, [HIDDEN.seconds(work) for work in works])
    assert msgspec.structs.asdict(found) == pytest.approx(msgspec.structs.asdict(HIDDEN), rel=0.01)


def test_layers_are_told_from_steps_where_models_differ():
    hidden = msgspec.structs.replace(HIDDEN, layer_s=3e-5)
    works = [work_of(model(name), it) for name in ("llama3-8b", "qwen3-8b") for it in BATCHES]
    found = fit(works, [hidden.seconds(work) for work in works])
    assert found.layer_s == pytest.approx(3e-5, rel=0.05)
    assert found.step_s == pytest.approx(1e-3, rel=0.05)


def test_noise_leaves_a_small_error_without_bias_on_other_shapes():
    rng = random.Random(0)
    works = [work_of(LLAMA, it) for it in BATCHES]
    noisy = [HIDDEN.seconds(work) * rng.uniform(0.95, 1.05) for work in works]
    found = fit(works, noisy)
    held_out = [work_of(LLAMA, it) for it in (Batch(((0, 700),)), batch(*[600] * 30), batch(4000))]
    errors = [found.seconds(work) / HIDDEN.seconds(work) - 1 for work in held_out]
    assert max(map(abs, errors)) < 0.04 and abs(fmean(errors)) < 0.025


def test_much_noise_does_not_make_what_is_fitted_too_short():
    """Relative to the measured times, the least sum of squares would be 4 % too short here."""
    rng = random.Random(0)
    works = [work_of(LLAMA, it) for it in BATCHES] * 100
    true = [HIDDEN.seconds(work) for work in works]
    found = fit(works, [seconds * rng.choice((0.8, 1.2)) for seconds in true])
    errors = [found.seconds(work) / s - 1 for work, s in zip(works, true, strict=True)]
    assert abs(fmean(errors)) < 0.01


def test_no_coefficient_is_negative_even_where_the_data_ask_for_it():
    """Times that fall with context and requests: what cannot be explained costs nothing."""
    works = [work_of(LLAMA, batch(*[c] * n)) for n in (1, 8, 64) for c in (128, 8192)]
    found = fit(works, [1.0, 0.9, 0.8, 0.7, 0.6, 0.5])
    assert min(msgspec.structs.astuple(found)) >= 0
    assert found.kv_byte_s == found.request_s == 0


def test_a_fit_of_one_step_is_refused():
    with pytest.raises(CostError, match="at least 2 steps with positive times; there are 1 steps"):
        fit([work_of(LLAMA, batch(5))], [1.0])


# --- As a cost -----------------------------------------------------------------------------


def test_a_roofline_is_a_cost_that_knows_its_domain():
    line = Roofline(name="box", coefficients=HIDDEN, domain=domain_of(BATCHES))
    cost = roofline(line, LLAMA, LINK, no_bytes)
    expected = HIDDEN.seconds(work_of(LLAMA, Batch(((0, 512),))))
    assert ms(cost, prefill((0, 512))) == pytest.approx(1e3 * expected, rel=1e-6)
    cost.step_ns(decode(*[1000] * 256))
    with pytest.warns(OutsideDomain, match="`box` is asked for 257 decoding .* from 1 to 256"):
        cost.step_ns(decode(*[1000] * 257))


def test_a_calibration_survives_its_file(tmp_path):
    padding = Padding(buckets=(16, 32), slots=4)
    line = Roofline(name="box", coefficients=HIDDEN, padding=padding, domain={"x": (1.0, 2.0)})
    path = tmp_path / "calibration.json"
    path.write_bytes(msgspec.json.encode({"roofline": line, "rows": []}))
    assert read_roofline(path) == line


def test_another_file_is_no_calibration(tmp_path):
    path = tmp_path / "other.json"
    path.write_text("{}")
    with pytest.raises(CostError, match=r"other.json` is not a calibration: .*`roofline`"):
        read_roofline(path)
