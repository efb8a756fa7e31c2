"""Measure how likely a model's own answers are, whole and damaged: python scripts/measure_log_probs.py MODEL_DIR.

The mean log-prob per token of a model's samples, under the distribution that they were sampled from, is
`rollout/log_probs` of a run's first step, which the doctor's row TPL03 judges. Prints the table of
docs/internals/evidence.md: prompts with and without the chat format, temperatures, lengths, precisions, and damages of
the weights, the tokenizer and the configuration.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from furlong.inference.embedded.transformers_model import cache_parameter

QUESTIONS = (
    "What is 3 + 5?", "What is 47 + 38? Answer with a number.", "Name the capital of France.",
    "Explain why the sky is blue.", "Write a function in Python that reverses a list.", "What is 12 * 11?",
    "List three fruits.", "Translate 'good morning' to Spanish.", "Who wrote Hamlet?", "Is 91 a prime number?",
    "What is the greatest common divisor of 12 and 18?", "Give me a short poem about the sea.",
)  # fmt: skip
TEXTS = (
    "The history of the Roman Empire began", "In mathematics, a prime number is", "def fibonacci(n):\n",
    "Once upon a time, in a small village,", "The mitochondrion is", "To make bread, you need",
    "The war ended in 1945, when", "import numpy as np\n\ndef softmax(x):\n", "Dear Sir or Madam,",
    "Photosynthesis is the process by which", "Q: What is 3 + 5?\nA:", "The population of the city grew",
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """A line of the table."""

    name: str
    form: str = "chat"  # chat, question, text, other
    temperature: float = 1.0
    max_new_tokens: int = 32
    dtype: torch.dtype = torch.float32
    damage: Callable[[Any], None] | None = None
    permutes_ids: bool = False


def layers(model: Any) -> Any:
    """Return the list of a model's layers."""
    return model.model.layers


def swap_layers(first: int, second: int) -> Callable[[Any], None]:
    """Return a damage that exchanges two layers."""

    def damage(model: Any) -> None:
        one, other = layers(model)[first], layers(model)[second]
        for left, right in zip(one.parameters(), other.parameters(), strict=True):
            left.data, right.data = right.data, left.data

    return damage


def permute_layers(model: Any) -> None:
    """Put all layers into a random order."""
    order = random.Random(0).sample(range(len(layers(model))), len(layers(model)))
    states = [{name: value.clone() for name, value in layer.state_dict().items()} for layer in layers(model)]
    for layer, source in zip(layers(model), order, strict=True):
        layer.load_state_dict(states[source])


def random_layer(index: int) -> Callable[[Any], None]:
    """Return a damage that initializes a layer at random, like one that was not loaded."""

    def damage(model: Any) -> None:
        torch.manual_seed(0)
        for name, value in layers(model)[index].named_parameters():
            if value.dim() > 1:
                torch.nn.init.normal_(value, std=0.02)
            else:
                value.data.fill_(1.0 if "norm" in name else 0.0)

    return damage


def random_head(model: Any) -> None:
    """Replace the output layer by a random one, which is not tied."""
    torch.manual_seed(0)
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(torch.randn_like(head.weight) * 0.02)


def rope_theta(value: float) -> Callable[[Any], None]:
    """Return a damage that sets another base of the rotary embedding."""

    def damage(model: Any) -> None:
        rotary = model.model.rotary_emb
        width = 2 * len(rotary.inv_freq)
        rotary.inv_freq = 1.0 / value ** (torch.arange(0, width, 2).float() / width)

    return damage


def scaled_norms(factor: float) -> Callable[[Any], None]:
    """Return a damage that multiplies the weight of the last norm."""

    def damage(model: Any) -> None:
        model.model.norm.weight.data.mul_(factor)

    return damage


def everything_random(model: Any) -> None:
    """Initialize the whole model at random."""
    for index in range(len(layers(model))):
        random_layer(index)(model)
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.02)


HEALTHY = (
    Setting("chat format"),
    Setting("chat format, bfloat16", dtype=torch.bfloat16),
    Setting("chat format, temperature 0.7", temperature=0.7),
    Setting("chat format, temperature 1.2", temperature=1.2),
    Setting("chat format, 8 tokens", max_new_tokens=8),
    Setting("chat format, 96 tokens", max_new_tokens=96),
    Setting("questions without a chat format", "question"),
    Setting("text to continue, as for a base model", "text"),
    Setting("text to continue, temperature 0.7", "text", 0.7),
    Setting("text to continue, temperature 1.2", "text", 1.2),
    Setting("text to continue, 96 tokens", "text", max_new_tokens=96),
    Setting("a wrong chat format", "other"),
)
DAMAGED = (
    Setting("layers 0 and 1 exchanged", damage=swap_layers(0, 1)),
    Setting("layers 10 and 11 exchanged", damage=swap_layers(10, 11)),
    Setting("layers 5 and 20 exchanged", damage=swap_layers(5, 20)),
    Setting("all layers in a random order", damage=permute_layers),
    Setting("layer 0 not loaded", damage=random_layer(0)),
    Setting("layer 15 not loaded", damage=random_layer(15)),
    Setting("output layer not loaded", damage=random_head),
    Setting("rope_theta 10,000 instead of 100,000", damage=rope_theta(1e4)),
    Setting("rope_theta 100 instead of 100,000", damage=rope_theta(100.0)),
    Setting("last norm halved", damage=scaled_norms(0.5)),
    Setting("tokenizer with other ids", permutes_ids=True),
    Setting("nothing loaded", damage=everything_random),
)


def prompts_of(setting: Setting, tokenizer: Any) -> Iterator[list[int]]:
    """Yield the token ids of the prompts."""
    for text in TEXTS if setting.form == "text" else QUESTIONS:
        if setting.form == "chat":
            messages = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        elif setting.form == "other":
            text = f"[INST] <<SYS>>\nYou are a helpful assistant.\n<</SYS>>\n\n{text} [/INST]"
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if setting.permutes_ids:
            table = list(range(len(tokenizer)))
            random.Random(0).shuffle(table)
            ids = [table[each] for each in ids]
        yield ids


@torch.inference_mode()
def measure(folder: Path, setting: Setting) -> tuple[float, float, float]:
    """Return the mean log-prob per sampled token, its standard error over answers, and their mean length."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=setting.dtype).eval()
    if setting.damage is not None:
        setting.damage(model)
    prompts = list(prompts_of(setting, tokenizer))
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    torch.manual_seed(0)
    name = cache_parameter(model)
    cache, last, sums = None, ids, torch.zeros(len(prompts))
    counts, is_open = torch.zeros(len(prompts)), torch.ones(len(prompts), dtype=torch.bool)
    for _ in range(setting.max_new_tokens):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -last.shape[1] :]
        answer = model(last, attention_mask=mask, position_ids=positions, use_cache=True, **{name: cache})
        cache = answer[name]
        log_probs = (answer.logits[:, -1].float() / setting.temperature).log_softmax(-1)
        last = torch.multinomial(log_probs.exp(), 1)
        sums += torch.where(is_open, log_probs.gather(1, last)[:, 0], 0.0)
        counts += is_open
        is_open &= last[:, 0] != tokenizer.eos_token_id
        mask = torch.cat([mask, torch.ones_like(last)], 1)
        if not is_open.any():
            break
    per_answer = sums / counts
    mean = float(sums.sum() / counts.sum())
    return mean, float(per_answer.std() / math.sqrt(len(prompts))), float(counts.mean())


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="a model in Hugging Face format, with Llama's layout")
    folder = parser.parse_args(argv).folder
    chance = math.log(AutoConfig.from_pretrained(folder).vocab_size)
    print("| setting | mean log-prob per token | share of chance | tokens per answer |\n|---|---|---|---|")
    for setting in (*HEALTHY, *DAMAGED):
        mean, error, length = measure(folder, setting)
        name = setting.name if setting in HEALTHY else f"*{setting.name}*"
        print(f"| {name} | {mean:.2f} ± {error:.2f} | {-mean / chance:.0%} | {length:.0f} |", flush=True)


if __name__ == "__main__":
    main()
