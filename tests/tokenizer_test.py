"""Token ids equal those of `transformers` and of the definitions; chats render; errors say what."""

import itertools
import json
from pathlib import Path

import gguf
import pytest
import tokenizers

from pdjax.architecture import ModelError
from pdjax.tokenizer import Tokenizer, load_tokenizer

GOLDEN = json.loads((Path(__file__).parent / "golden" / "smollm2_tokens.json").read_text())
TEXT = "héllo wörld\n\x00 漢字 🙂"


@pytest.fixture(scope="module")
def smol(smollm2) -> Tokenizer:
    return load_tokenizer(smollm2)


def test_ids_match_transformers(smol):
    for case in GOLDEN["texts"] + GOLDEN["prompts"]:
        assert smol.encode(case["text"]) == case["ids"], case["text"]


def test_chats_match_transformers(smol):
    for case in GOLDEN["prompts"]:
        if case["kind"] == "chat":
            assert smol.chat([{"role": "user", "content": case["content"]}]) == case["text"]


def test_decoding_gives_the_text_back_without_special_tokens(smol):
    for case in GOLDEN["texts"]:
        plain = case["text"]
        for special in ("<|im_start|>", "<|im_end|>", "<|endoftext|>"):
            plain = plain.replace(special, "")
        assert smol.decode(case["ids"]) == plain
    for case in GOLDEN["prompts"]:
        assert smol.decode(case["tokens"]) == case["continuation"]


def test_smollm2_ends_a_text_with_im_end(smol):
    assert smol.eos == (smol.backend.token_to_id("<|im_end|>"),)
    assert smol.vocab == 49152


def test_saved_tokenizer_is_the_same(smol, tmp_path):
    smol.save(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    again = load_tokenizer(str(tmp_path))
    assert (again.eos, again.bos, again.template) == (smol.eos, smol.bos, smol.template)
    assert [again.encode(c["text"]) for c in GOLDEN["texts"]] == [c["ids"] for c in GOLDEN["texts"]]


def test_a_token_of_random_weights_is_a_byte():
    tokenizer = load_tokenizer("random:tiny")
    assert tokenizer.encode(TEXT) == list(TEXT.encode())
    assert tokenizer.decode(list(TEXT.encode())) == TEXT
    assert (tokenizer.vocab, tokenizer.eos) == (256, ())
    chat = tokenizer.chat([{"role": "user", "content": "hi"}])
    assert chat == "user: hi\nassistant: "


# --- GGUF files of our own ---------------------------------------------------------------

BYTES = "".join(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))


def write_gguf(path: Path, kind: str, tokens: list[str], **more) -> str:
    """A GGUF with a tokenizer only; `more` are calls of the writer, by name."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    for call, value in more.items():
        getattr(writer, call)(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return str(path)


@pytest.mark.parametrize(
    ("pre", "pieces"),  # of "ab 1234", a merge within each would join everything it may
    [
        ("gpt-2", ["ab", "Ġ1234"]),
        ("smollm", ["ab", "Ġ", "1", "2", "3", "4"]),
        ("llama-bpe", ["ab", "Ġ", "123", "4"]),
        ("qwen2", ["ab", "Ġ", "1", "2", "3", "4"]),
    ],
)
def test_text_is_cut_as_the_gguf_says(pre, pieces, tmp_path):
    merges = ["a b", "1 2", "12 3", "123 4", "Ġ 1234", "Ġ 1"]
    tokens = [*BYTES, *(merge.replace(" ", "") for merge in merges)]
    source = write_gguf(
        tmp_path / "m.gguf", "gpt2", tokens, add_tokenizer_pre=pre, add_token_merges=merges
    )
    ids = load_tokenizer(source).encode("ab 1234")
    assert [tokens[i] for i in ids] == pieces


def test_first_token_is_added_once(tmp_path):
    tokens = [*BYTES, "ab", "<s>"]
    types = [gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL]
    source = write_gguf(
        tmp_path / "m.gguf",
        "gpt2",
        tokens,
        add_tokenizer_pre="llama-bpe",
        add_token_merges=["a b"],
        add_token_types=types,
        add_bos_token_id=257,
        add_chat_template="{{ bos_token }}{{ messages[0].content }}",
    )
    tokenizer = load_tokenizer(source)
    a = BYTES.index("a")
    assert tokenizer.encode("a") == [257, a]
    assert tokenizer.encode(tokenizer.chat([{"role": "user", "content": "a"}])) == [257, a]


def joined_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE by its definition: join the best-scored neighbours until none join."""
    parts = list(text)
    while True:
        joined = [a + b for a, b in itertools.pairwise(parts)]
        pairs = [(-scores[whole], i) for i, whole in enumerate(joined) if whole in scores]
        if not pairs:
            return parts
        i = min(pairs)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def test_scored_tokens_join_as_in_sentencepiece(tmp_path):
    words = ["▁t", "he", "▁the", "th", "in", "▁in", "er", "ther", "▁th", "the", "ing", "▁ther"]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz"]
    tokens = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), *letters, *words]
    by_token = {word: -float(i) for i, word in enumerate(words)}
    by_token |= {"ab": -2.5, "bc": -1.5, "cd": -3.5}  # abcd: a bc d by scores, ab cd by ids
    tokens += ["ab", "bc", "cd"]
    scores = [0.0] * 257 + [-1000.0] * len(letters) + list(by_token.values())
    kinds = gguf.TokenType
    source = write_gguf(
        tmp_path / "m.gguf",
        "llama",
        tokens,
        add_token_scores=scores,
        add_token_types=[kinds.UNKNOWN] + [kinds.BYTE] * 256 + [kinds.NORMAL] * (len(tokens) - 257),
    )
    tokenizer = load_tokenizer(source)
    for text in ("the thing in there", "hither and thither", "singing in the inner ring abcd"):
        ids = tokenizer.encode(text)
        assert [tokens[i] for i in ids] == joined_by_score("▁" + text.replace(" ", "▁"), by_token)
        assert tokenizer.decode(ids) == text
    assert tokenizer.decode(tokenizer.encode("é the")) == "é the"  # bytes where no token fits


def test_what_is_missing_is_said_in_one_line(tmp_path):
    plain = write_gguf(tmp_path / "m.gguf", "gpt2", [*BYTES, "ab"], add_token_merges=["a b"])
    wordpiece = write_gguf(tmp_path / "w.gguf", "bert", list(BYTES))
    (tmp_path / "config.json").write_text("{}")
    odd = write_gguf(tmp_path / "o.gguf", "gpt2", list(BYTES), add_tokenizer_pre="tekken")
    bare = load_tokenizer("random:tiny").backend
    for call, says in [
        (lambda: load_tokenizer(plain).chat([]), "no chat template"),
        (lambda: load_tokenizer(wordpiece), "`bert` tokenizer"),
        (lambda: load_tokenizer(odd), "`tekken`"),
        (lambda: load_tokenizer(str(tmp_path)), "no `tokenizer.json`"),
        (lambda: load_tokenizer("random:nothing"), "`nothing`"),
        (lambda: Tokenizer(bare, template="{{ raise_exception('odd') }}").chat([]), "odd"),
        (lambda: Tokenizer(bare, template="{{ missing.thing }}").chat([]), "undefined"),
    ]:
        with pytest.raises(ModelError, match=says) as error:
            call()
        assert "\n" not in str(error.value)
