"""Our forward gives the logits and the tokens that `transformers` gives."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pdjax.architecture import ModelError
from pdjax.programs import model
from pdjax.programs.weights import open_checkpoint

T, V = 24, 96
TINY = dict(
    vocab_size=V,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
LLAMA3 = dict(
    rope_theta=500.0,
    rope_type="llama3",
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
# name, transformers' class, what differs from TINY
CASES = [
    ("llama", "Llama", dict()),
    ("tied", "Llama", dict(tie_word_embeddings=True, head_dim=16)),
    ("llama3 rope", "Llama", dict(rope_parameters=LLAMA3)),
    ("linear rope", "Llama", dict(rope_parameters=dict(rope_type="linear", factor=3.0))),
    ("qwen2", "Qwen2", dict()),
    ("qwen3", "Qwen3", dict(head_dim=16)),
    ("mistral", "Mistral", dict(sliding_window=5)),
]


def dense(arch: model.Architecture) -> model.Attend:
    """Causal attention over one text, as in a textbook: each kv head repeated for its queries."""

    def attend(q_TNH, k_TKH, v_TKH):
        back = np.arange(len(q_TNH))[:, None] - np.arange(len(q_TNH))[None, :]
        seen_TS = (back >= 0) & (back < (arch.window or len(q_TNH)))
        k_SNH, v_SNH = (jnp.repeat(x, arch.N // arch.K, axis=1) for x in (k_TKH, v_TKH))
        scores_NTS = jnp.einsum("TNH,SNH->NTS", q_TNH, k_SNH) * arch.H**-0.5
        weights_NTS = jax.nn.softmax(jnp.where(seen_TS[None], scores_NTS, -jnp.inf), axis=-1)
        return jnp.einsum("NTS,SNH->TNH", weights_NTS, v_SNH)

    return attend


@functools.cache
def program(arch: model.Architecture):
    @jax.jit
    def run(params, tokens_T):
        x_TD = model.embed(arch, params, tokens_T)
        positions_T = jnp.arange(len(tokens_T), dtype=jnp.int32)
        attends = [dense(arch)] * arch.L
        x_TD = model.run_layers(arch, params["layers"], x_TD, positions_T, attends)
        return model.logits(arch, params, x_TD)

    return run


def forward(arch: model.Architecture, params: model.Params, tokens_T: np.ndarray) -> np.ndarray:
    """logits_TV of one text."""
    return np.asarray(program(arch)(params, jnp.asarray(tokens_T, jnp.int32)))


@pytest.mark.parametrize(("name", "family", "changes"), CASES, ids=[c[0] for c in CASES])
@pytest.mark.filterwarnings("default")  # of torch and transformers, not ours
def test_logits_match_transformers(name, family, changes, tmp_path):
    torch = pytest.importorskip("torch", reason="needs torch: pip install 'pdjax[peers]'")
    peers = pytest.importorskip("transformers", reason="needs transformers: 'pdjax[peers]'")
    torch.manual_seed(0)
    config = getattr(peers, f"{family}Config")(**TINY | changes)
    config._attn_implementation = "eager"
    peer = getattr(peers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in peer.parameters():  # biases and norms too, which begin at 0 and 1
            parameter += 0.2 * torch.randn_like(parameter)
    peer.save_pretrained(tmp_path)
    tokens_T = np.random.default_rng(0).integers(0, V, T)
    with torch.no_grad():
        expected_TV = peer(torch.tensor(tokens_T[None])).logits[0].numpy()

    checkpoint = open_checkpoint(str(tmp_path))
    ours_TV = forward(checkpoint.arch, checkpoint.place(), tokens_T)

    assert np.abs(expected_TV).max() > 1  # the comparison below says something
    assert np.abs(ours_TV - expected_TV).max() <= 1e-4


def test_smollm2_continues_as_in_transformers(smollm2):
    """The 48 greedy tokens of five prompts. Each golden token is checked to be the best one after
    the prompt and the golden tokens before it, which by induction is the greedy continuation."""
    path = Path(__file__).parent / "golden" / "smollm2_tokens.json"
    checkpoint = open_checkpoint(smollm2)
    params = checkpoint.place()
    for prompt in json.loads(path.read_text())["prompts"]:
        text = prompt["ids"] + prompt["tokens"]
        padded = np.pad(text, (0, 96 - len(text)))  # one length, one compilation
        best_T = forward(checkpoint.arch, params, padded).argmax(-1)
        first = len(prompt["ids"]) - 1
        assert best_T[first : len(text) - 1].tolist() == prompt["tokens"], prompt["content"]


@pytest.fixture(scope="module")
def tiny():
    checkpoint = open_checkpoint("random:tiny")
    return checkpoint.arch, checkpoint.place()


def test_a_token_depends_on_those_before_it_only(tiny):
    arch, params = tiny
    tokens_T = np.arange(12) * 7
    changed_T = np.where(np.arange(12) == 8, 3, tokens_T)
    before, after = forward(arch, params, tokens_T), forward(arch, params, changed_T)
    np.testing.assert_array_equal(before[:8], after[:8])
    assert (np.abs(before[8:] - after[8:]).max(-1) > 1e-3).all()


def test_layer_groups_compose_to_the_whole(tiny):
    arch, params = tiny
    positions_T = jnp.arange(6, dtype=jnp.int32)
    x_TD = model.embed(arch, params, positions_T)
    whole_TD = model.run_layers(arch, params["layers"], x_TD, positions_T, [dense(arch)] * 4)
    for a, b in ((0, 1), (1, 3), (3, 4)):
        attends = [dense(arch)] * (b - a)
        x_TD = model.run_layers(arch, params["layers"][a:b], x_TD, positions_T, attends)
    np.testing.assert_allclose(x_TD, whole_TD, rtol=1e-6)


def test_rotary_embedding_sees_only_distances(tiny):
    arch, _ = tiny
    q_TNH, k_TNH = np.random.default_rng(0).normal(size=(2, 5, 1, arch.H)).astype(np.float32)

    def scores(shift: int) -> jax.Array:
        positions_T = jnp.arange(5, dtype=jnp.int32) + shift
        q, k = (model.rotate(arch, jnp.asarray(x), positions_T) for x in (q_TNH, k_TNH))
        return jnp.einsum("TNH,SNH->TS", q, k)

    np.testing.assert_allclose(scores(0), scores(17), atol=1e-4)


def test_bfloat16_norms_and_logits_are_computed_in_float32(tiny):
    arch, params = tiny
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    tokens_T = np.arange(16) * 5
    exact_TV, rough_TV = forward(arch, params, tokens_T), forward(arch, half, tokens_T)
    assert rough_TV.dtype == np.float32
    assert np.abs(exact_TV - rough_TV).max() < 0.1
    assert len(np.unique(rough_TV)) > len(np.unique(rough_TV.astype(jnp.bfloat16)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(D=0), "`D`"),
        (dict(N=7), "N=7"),
        (dict(H=15), "H=15"),
        (dict(rope_scaling=(1.0,)), "H / 2"),
        (dict(window=0), "`window`"),
    ],
)
def test_impossible_architecture_is_refused_in_one_line(changes, says):
    sizes = dict(name="x", V=256, D=64, F=128, L=4, N=8, K=4, H=16)
    with pytest.raises(ModelError, match=says) as error:
        model.Architecture(**sizes | changes)
    assert "\n" not in str(error.value)


def test_parameters_counts_the_arrays():
    sizes = dict(V=256, D=64, F=128, L=3, N=8, K=4, H=16)
    for choices in (dict(), dict(tied=True), dict(qkv_bias=True), dict(qk_norm=True)):
        arch = model.Architecture("x", **sizes, **choices)
        arrays = jax.tree.leaves(model.abstract_params(arch))
        assert arch.parameters == sum(x.size for x in arrays)
