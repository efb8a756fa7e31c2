"""Calibrates quantized weights on texts, decoder layer by decoder layer, with a whole model in memory.

The texts are the user's, or what the model writes itself. At the end the scales of INT4 are tuned together, so that the
whole model's distribution of tokens comes closer to the unquantized one.

Axes: T tokens of a sequence, E hidden size, R rows of a weight, G its groups.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from furlong.errors import CheckpointError, ConfigError
from furlong.inference.embedded import EmbeddedEngine
from furlong.interfaces import SamplingParams
from furlong.models.hf_config import load_config
from furlong.models.hf_model import load_network
from furlong.models.tokenizer import load_tokenizer
from furlong.quantization.compensation import Compensable, compensated
from furlong.quantization.int4 import Int4Groups
from furlong.quantization.scheme import QuantizationScheme

MIN_WINDOWS, MAX_WINDOWS = 16, 32  # sequences of the text, spread evenly
WINDOW = 512  # tokens of each
NUM_FROM_ANY, NUM_FROM_BEGIN = 64, 32  # sequences that begin with a random token, and with the model's first one
LENGTH = 256  # tokens of each
BATCH_TOKENS = 512  # of an optimizer step
LEARNING_RATE, WARMUP = 0.002, 5  # of the scales' ratios to those before; steps

Parts = Mapping[str, Tensor]


@dataclass(frozen=True)
class Calibration:
    """What weights are calibrated on. text: None for samples of the model itself."""

    text: str | None


@dataclass
class _LayerCalls:
    """The keywords of each decoder layer for one sequence, and the hidden states of all sequences."""

    keywords: list[dict[str, Any]]
    hidden: list[Tensor]


@torch.no_grad()
def calibrated_parts(folder: Path, scheme: QuantizationScheme, calibration: Calibration) -> dict[str, Parts]:
    """Return the stored parts of the folder's quantized linear layers, by the names of their weights.

    Each linear layer gets its inputs from the quantized ones before it. At the end, the scales of INT4 are tuned
    together. Weights that are not separate modules, as those of fused experts, are left out. Raises ConfigError for
    a short text, and CheckpointError for values that are not finite.
    """
    form = cast("Compensable", scheme.form)
    text = calibration.text
    ids = own_samples(folder) if text is None else _windows(load_tokenizer(folder).encode(text))
    model = load_network(folder, load_config(folder), dtype=torch.float32, attn_implementation="eager").eval()
    layers: Sequence[nn.Module] = cast("Any", model.base_model).layers
    calls = _first_inputs(model, layers, ids)
    is_tuned = isinstance(form, Int4Groups)
    targets = [_last_hidden(model, sequence) for sequence in ids] if is_tuned else []
    parts: dict[str, Parts] = {}
    names = {module: f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for layer, keywords in zip(layers, calls.keywords, strict=True):
        linears = [each for each in layer.modules() if isinstance(each, nn.Linear) and names[each] in scheme.names]
        for together in _by_input(layer, linears, keywords, calls.hidden[0]):
            moment_CC = _input_moment(layer, together[0], keywords, calls.hidden)
            for module in together:
                weight = module.weight.to(scheme.dtype)
                if not bool(torch.isfinite(weight).all() and torch.isfinite(moment_CC).all()):
                    raise CheckpointError(f"{folder}: {names[module]} or its inputs are not finite; `furlong check` it")
                parts[names[module]] = compensated(form, weight, moment_CC)
                module.weight.copy_(form.dequantize(parts[names[module]], torch.float32))
        calls.hidden = [_output(layer(hidden, **keywords)) for hidden in calls.hidden]
    if is_tuned:
        scales = {module: parts[name]["weight_scale"] for module, name in names.items() if name in parts}
        for module, scale in tuned_scales(model, scales, ids, targets).items():
            parts[names[module]] = {**parts[names[module]], "weight_scale": scale}
    return parts


def _last_hidden(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the last hidden states of a sequence, in bfloat16, because those of all sequences are kept."""
    return model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0].to(torch.bfloat16)


def _windows(ids: Sequence[int]) -> Tensor:
    """Return sequences [windows, WINDOW] that are spread over the text. Raises ConfigError for a short text."""
    if len(ids) < MIN_WINDOWS * WINDOW:
        raise ConfigError(
            f"--calibrate has a text of {len(ids):,} tokens; give one of at least {MIN_WINDOWS * WINDOW:,}, such as "
            "prompts and responses of the task, or none for samples of the model itself"
        )
    number = min(len(ids) // WINDOW, MAX_WINDOWS)
    starts = [(len(ids) - WINDOW) * window // (number - 1) for window in range(number)]
    return torch.tensor([list(ids[start : start + WINDOW]) for start in starts])


class _Captured(Exception):  # noqa: N818  not an error: ends a forward pass
    """The inputs that were wanted are known."""


def _first_inputs(model: PreTrainedModel, layers: Sequence[nn.Module], ids: Tensor) -> _LayerCalls:
    """Return how the model calls its layers for a sequence, and the inputs of the first one for all sequences."""
    calls = _LayerCalls([], [])

    def keep(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        hidden = args[0] if args else keywords["hidden_states"]
        if module is layers[0]:
            calls.hidden.append(hidden)
        if len(calls.keywords) == len(layers):
            raise _Captured
        calls.keywords.append({name: value for name, value in keywords.items() if name != "hidden_states"})

    handles = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in layers]
    for sequence in ids:
        with suppress(_Captured):
            model.base_model(input_ids=sequence[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return calls


def _by_input(
    layer: nn.Module, linears: Sequence[nn.Linear], keywords: dict[str, Any], hidden: Tensor
) -> list[list[nn.Linear]]:
    """Return the linear layers in the order of their calls, those with the same input together."""
    inputs: list[Tensor] = []
    groups: list[list[nn.Linear]] = []

    def note(module: nn.Linear, args: tuple[Tensor, ...]) -> None:
        if inputs and args[0] is inputs[-1]:
            groups[-1].append(module)
        else:
            inputs.append(args[0])
            groups.append([module])

    with _hooks(linears, note):
        layer(hidden, **keywords)
    return groups


def _input_moment(layer: nn.Module, linear: nn.Linear, keywords: dict[str, Any], inputs: Sequence[Tensor]) -> Tensor:
    moment_CC = torch.zeros(linear.in_features, linear.in_features)

    def add(module: nn.Linear, args: tuple[Tensor, ...]) -> None:  # noqa: ARG001  torch's signature
        rows = args[0].flatten(0, -2)
        moment_CC.addmm_(rows.T, rows)
        raise _Captured

    with _hooks([linear], add):
        for hidden in inputs:
            with suppress(_Captured):
                layer(hidden, **keywords)
    return moment_CC


@contextmanager
def _hooks(modules: Sequence[nn.Module], hook: Any) -> Generator[None]:
    handles = [module.register_forward_pre_hook(hook) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _output(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


# ---- scales of INT4


class _Scaled(nn.Module):
    """A weight whose groups are multiplied by ratios."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.ratio_RG = nn.Parameter(torch.ones(shape))

    def forward(self, weight: Tensor) -> Tensor:
        return (weight.unflatten(1, (self.ratio_RG.shape[1], -1)) * self.ratio_RG[:, :, None]).flatten(1)


def tuned_scales(
    model: PreTrainedModel, scales: Mapping[nn.Linear, Tensor], ids: Tensor, targets: Sequence[Tensor]
) -> dict[nn.Linear, Tensor]:
    """Return better scales [R, G] of linear layers, whose weights in `model` are the quantized ones, in one pass.

    ids: sequences [sequences, T]. targets: for each, the last hidden states [T, E] of the unquantized model. The
    divergence (KL) of the tokens' distributions falls; the integers of the weights stay. Changes the modules.
    """
    model.requires_grad_(False)
    ratios: dict[nn.Linear, nn.Parameter] = {}
    for module, scale in scales.items():
        scaled = _Scaled(tuple(scale.shape))
        parametrize.register_parametrization(module, "weight", scaled)
        ratios[module] = scaled.ratio_RG
    optimizer = torch.optim.Adam(ratios.values(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    batches = order.split(max(1, BATCH_TOKENS // ids.shape[1]))
    with torch.enable_grad():
        for step, batch in enumerate(batches):
            for group in optimizer.param_groups:
                cosine = (1 + math.cos(math.pi * step / len(batches))) / 2
                group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARMUP) * cosine
            for sequence in batch.tolist():
                (_divergence(model, ids[sequence], targets[sequence]) / len(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {module: (scale.float() * ratios[module].detach()).to(scale.dtype) for module, scale in scales.items()}


def _divergence(model: PreTrainedModel, ids: Tensor, target_TE: Tensor) -> Tensor:
    head = cast("Any", model).get_output_embeddings()
    with torch.autocast("cpu", torch.bfloat16):
        hidden_TE = model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        logits, target = head(hidden_TE).float(), head(target_TE).float()
    return functional.kl_div(logits.log_softmax(-1), target.log_softmax(-1), reduction="batchmean", log_target=True)


# ---- texts of the model itself


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
