"""Compare the perplexity of a text under several model folders: python scripts/measure_perplexity.py TEXT FOLDER ...

The first folder is the reference, usually the bfloat16 model; quantized folders are computed with the values that their
weights stand for. Prints one line for each folder.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch.nn import functional

from furlong.models.hf_model import load_model
from furlong.models.tokenizer import load_tokenizer

WINDOW = 1024  # tokens that are read together


@torch.inference_mode()
def perplexity(folder: Path, text: str, *, num_tokens: int) -> tuple[float, int]:
    """Return the perplexity of the first tokens of `text`, in float32, and their number."""
    model = load_model(folder)
    model.set_attn_implementation("eager")
    ids = torch.tensor(load_tokenizer(folder).encode(text)[:num_tokens])
    total = 0.0
    count = 0
    for window in ids.split(WINDOW):
        if len(window) > 1:
            logits = model(window[None]).logits[0, :-1].float()
            total += float(functional.cross_entropy(logits, window[1:], reduction="sum"))
            count += len(window) - 1
    return math.exp(total / count), count


def main() -> None:
    """Print the perplexity of each folder, and its difference to the first one's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--num-tokens", type=int, default=2048)
    options = parser.parse_args()
    first = None
    for folder in options.folders:
        value, count = perplexity(folder, options.text.read_text(encoding="utf-8"), num_tokens=options.num_tokens)
        first = value if first is None else first
        print(f"{folder}: perplexity {value:.3f} of {count} tokens, {100 * (value / first - 1):+.2f} %")


if __name__ == "__main__":
    main()
