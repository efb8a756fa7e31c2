"""Compare the perplexity of a text under several model folders: python scripts/measure_perplexity.py FOLDER ...

The first folder is the reference, usually the bfloat16 model; quantized folders are computed with the values that their
weights stand for, in float32 like the reference. Prints one line for each folder, with the standard error of its
difference. The text is a story of 1889, in the public domain, unless --text names another.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from furlong.models.hf_model import load_model
from furlong.models.tokenizer import load_tokenizer

STORY = Path(__file__).parents[1] / "benchmarks" / "data" / "in_the_year_2889.txt"
WINDOW = 1024  # tokens that are read together


@torch.inference_mode()
def losses(folder: Path, text: str, *, num_tokens: int | None) -> Tensor:
    """Return the negative log-prob of each of the first tokens of `text`, in float32."""
    model = load_model(folder)
    model.set_attn_implementation("eager")
    windows = torch.tensor(load_tokenizer(folder).encode(text)[:num_tokens]).split(WINDOW)
    return torch.cat(
        [
            functional.cross_entropy(model(window[None]).logits[0, :-1].float(), window[1:], reduction="none")
            for window in windows
            if len(window) > 1
        ]
    )


def main() -> None:
    """Print the perplexity of each folder, and its difference to the first one's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--text", type=Path, default=STORY)
    parser.add_argument("--num-tokens", type=int, help="first tokens of the text (default: all)")
    options = parser.parse_args()
    text = options.text.read_text(encoding="utf-8")
    first = None
    for folder in options.folders:
        loss = losses(folder, text, num_tokens=options.num_tokens)
        first = loss if first is None else first
        change = loss - first
        error = float(change.std()) / math.sqrt(len(change))
        print(
            f"{folder}: perplexity {float(loss.mean().exp()):.3f} of {len(loss)} tokens, "
            f"{100 * math.expm1(float(change.mean())):+.2f} % (+- {100 * error:.2f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
