"""Texts that a model writes itself, for calibration without data."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch
from torch import Tensor

from furlong.inference.embedded import EmbeddedEngine
from furlong.interfaces import SamplingParams
from furlong.models.hf_config import load_config
from furlong.models.tokenizer import load_tokenizer

NUM_FROM_ANY, NUM_FROM_BEGIN = 64, 32  # sequences that begin with a random token, and with the model's first one
LENGTH = 256  # tokens of each


def own_samples(folder: Path) -> Tensor:
    """Return sequences [samples, LENGTH] that the model of the folder samples at temperature 1, the same in each call.

    A random first token leads to all kinds of texts; `bos_token_id`, if there is one, to chats in instruct models.
    """
    tokenizer, config = load_tokenizer(folder), load_config(folder)
    vocab_size = min(len(tokenizer.get_vocab()), config.get_text_config().vocab_size)
    first = torch.randint(vocab_size, (NUM_FROM_ANY + NUM_FROM_BEGIN,), generator=torch.Generator().manual_seed(0))
    if isinstance(config.bos_token_id, int):
        first[NUM_FROM_ANY:] = config.bos_token_id
    return torch.tensor(asyncio.run(_completed(folder, first.tolist())))


async def _completed(folder: Path, first: list[int]) -> list[list[int]]:
    engine = EmbeddedEngine(folder, dtype=torch.bfloat16, num_slots=len(first), context_len=LENGTH, prefix_tokens=0)
    try:
        completions = await asyncio.gather(
            *(
                engine.generate(
                    [token], SamplingParams(max_new_tokens=LENGTH - 1, ignore_eos=True, sampling_seed=number)
                )
                for number, token in enumerate(first)
            )
        )
    finally:
        await engine.close()
    return [[token, *completion.tokens] for token, completion in zip(first, completions, strict=True)]
