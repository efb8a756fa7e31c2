"""Builders of data files and a tokenizer for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'villain' %}{{ raise_exception('no villains') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if tools %}[{{ tools | length }} tools]\n{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if no_think %}<think></think>{% endif %}{% endif %}"
)


def chat_tokenizer() -> Any:
    """Return a byte-level tokenizer with a ChatML template: every byte is a token, so lengths are obvious."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    """Write one line per row; strings are written verbatim, for lines that are not JSON."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def numbered_rows(n: int) -> list[dict[str, Any]]:
    """Return rows with prompts of different lengths; the label is the row number."""
    return [{"input": f"{'x' * (i % 7)}{i}", "label": str(i), "metadata": {"n": [i]}} for i in range(n)]
