"""Text to token ids and back, and chats to text, for every source of a model."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from pdjax.architecture import ModelError
from pdjax.sources import Gguf, end_tokens, find, read_json

_BYTES_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# Token types of a GGUF (llama.cpp's enum llama_token_type).
_CONTROL, _USER_DEFINED = 3, 4


@dataclass(frozen=True)
class Tokenizer:
    """Token ids of one model. `eos`: ids that end a text; `bos`: the first token's text, if any."""

    backend: tokenizers.Tokenizer
    eos: tuple[int, ...] = ()
    bos: str = ""
    template: str = ""

    @property
    def vocab(self) -> int:
        """Number of ids, special ones included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Special tokens in the text become their ids. A model that wants a first token (`bos`)
        gets it once, whether or not the text (a chat) already begins with it."""
        begun = bool(self.bos) and text.startswith(self.bos)
        return self.backend.encode(text, add_special_tokens=not begun).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens; bytes that are no UTF-8 (yet) become U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt that asks for the next message. messages: {"role": ..., "content": ...}.

        Raises ModelError where the model has no chat template, or its template refuses the chat.
        """
        if not self.template:
            raise ModelError("this model has no chat template; send plain prompts")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.globals["raise_exception"] = _refuse
        try:
            return environment.from_string(self.template).render(
                messages=messages,
                add_generation_prompt=True,
                bos_token=self.bos,
                eos_token=self.backend.id_to_token(self.eos[0]) if self.eos else "",
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ModelError(f"the chat template does not take these messages: {error}") from None

    def save(self, folder: str | Path) -> None:
        """Writes tokenizer.json and what goes with it, in Hugging Face's form."""
        folder = Path(folder).expanduser()
        self.backend.save(str(folder / "tokenizer.json"))
        config = {"bos_token": self.bos, "chat_template": self.template}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
        ends = {"eos_token_id": list(self.eos)}
        (folder / "generation_config.json").write_text(json.dumps(ends, indent=1))


def load_tokenizer(source: str) -> Tokenizer:
    """The tokenizer of a source (see pdjax.sources); `random:NAME` gets one id per byte.

    Raises ModelError: nothing there, no tokenizer, or one of a kind that we do not build.
    """
    found = find(source)
    if found.kind == "random":
        return _bytes()
    if found.kind == "gguf":
        return _from_gguf(Gguf(found.path))
    return _from_folder(found.path)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _bytes() -> Tokenizer:
    """Token id = byte. `ByteLevel` shows a byte as a printable character; this is its table."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = sorted(set(range(256)) - set(printable))
    vocab = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, template=_BYTES_TEMPLATE)


# --- Hugging Face's files ----------------------------------------------------------------


def _from_folder(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ModelError(
            f"`{folder}` has no `tokenizer.json`; copy it from where the model is from"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing more precise
        raise ModelError(f"`{path}` cannot be read: {error}") from None
    config = read_json(folder / "tokenizer_config.json")
    eos = backend.token_to_id(_content(config.get("eos_token")))
    ends = {*end_tokens(folder)} if eos is None else {*end_tokens(folder), eos}
    return Tokenizer(
        backend,
        eos=tuple(sorted(ends)),
        bos=_content(config.get("bos_token")),
        template=_template(folder, config),
    )


def _content(token: Any) -> str:
    """A special token in a tokenizer_config.json is a string, or an object with its `content`."""
    return (token["content"] if isinstance(token, dict) else token) or ""


def _template(folder: Path, config: Mapping[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text()
    template = config.get("chat_template") or ""
    if isinstance(template, list):  # several, by name
        return next((t["template"] for t in template if t["name"] == "default"), "")
    return template


# --- GGUF metadata -----------------------------------------------------------------------


def _from_gguf(file: Gguf) -> Tokenizer:
    kind = file.need("tokenizer.ggml.model")
    tokens = file.need("tokenizer.ggml.tokens")
    vocab = {token: index for index, token in enumerate(tokens)}
    if kind == "gpt2":
        backend = _byte_level_bpe(file, vocab)
    elif kind == "llama":
        backend = _scored_bpe(file, vocab)
    else:
        raise ModelError(f"`{file.path}` has a `{kind}` tokenizer; `gpt2` and `llama` are built")

    types = file.get("tokenizer.ggml.token_type", [])
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        backend.add_tokens(
            [
                AddedToken(token, special=special, normalized=False)
                for token, its_type in zip(tokens, types, strict=False)
                if its_type == wanted
            ]
        )
    bos = file.get("tokenizer.ggml.bos_token_id")
    starts = kind == "llama" or file.get("tokenizer.ggml.pre") == "llama-bpe"
    if bos is not None and file.get("tokenizer.ggml.add_bos_token", starts):
        backend.post_processor = processors.TemplateProcessing(
            single=[tokens[bos], "$A"], special_tokens=[(tokens[bos], bos)]
        )
    eos = {file.get("tokenizer.ggml.eos_token_id"), file.get("tokenizer.ggml.eot_token_id")}
    return Tokenizer(
        backend,
        eos=tuple(sorted(eos - {None})),
        bos="" if bos is None else tokens[bos],
        template=file.get("tokenizer.chat_template", ""),
    )


def _byte_level(pattern: str = "") -> pre_tokenizers.PreTokenizer:
    """Cuts text by `pattern` (default: GPT-2's), then spells it in bytes."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern)
    if not pattern:
        return level
    cut = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([cut, level])


# How text is cut before BPE, by `tokenizer.ggml.pre`, as in the models' published tokenizer.json.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_DIGITS = pre_tokenizers.Digits(individual_digits=True)
_CUTS: dict[str, pre_tokenizers.PreTokenizer] = {
    "default": _byte_level(),
    "gpt-2": _byte_level(),
    "smollm": pre_tokenizers.Sequence([_DIGITS, _byte_level()]),
    "llama-bpe": _byte_level(_WORDS + r"\p{N}{1,3}" + _SIGNS),
    "qwen2": _byte_level(_WORDS + r"\p{N}" + _SIGNS),
}


def _byte_level_bpe(file: Gguf, vocab: dict[str, int]) -> tokenizers.Tokenizer:
    pre = file.get("tokenizer.ggml.pre", "default")
    if pre not in _CUTS:
        raise ModelError(f"`{file.path}` cuts text by `{pre}`; we know {sorted(_CUTS)}")
    merges = [tuple(merge.split(" ")) for merge in file.need("tokenizer.ggml.merges")]
    model = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe")
    backend = tokenizers.Tokenizer(model)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _CUTS[pre]
    backend.decoder = decoders.ByteLevel()
    return backend


def _scored_bpe(file: Gguf, vocab: dict[str, int]) -> tokenizers.Tokenizer:
    """SentencePiece's BPE: of all neighbours that join to a token, join those of the best score
    first. So every split of a token into two tokens is a merge, ranked by the token's score."""
    scores = file.need("tokenizer.ggml.scores")
    merges = [
        (token[:cut], token[cut:])
        for token in sorted(vocab, key=lambda token: -scores[vocab[token]])
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    unknown = file.get("tokenizer.ggml.unknown_token_id", 0)
    model = models.BPE(
        vocab=vocab,
        merges=merges,
        unk_token=next(token for token, index in vocab.items() if index == unknown),
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    space = normalizers.Replace(" ", "▁")
    prefix = file.get("tokenizer.ggml.add_space_prefix", True)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), space]) if prefix else space
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * bool(prefix))
    return backend
