"""Convert between Hugging Face folders, checkpoints of a run, and Megatron-LM checkpoints.

Runs in one process on the CPU, with one parameter in memory at a time. The result is read back and compared.
"""

from __future__ import annotations

# Megatron-core's annotations do not match what its functions accept and return.
# pyright: reportAttributeAccessIssue=false
import contextlib
import logging
from collections.abc import Callable, Generator, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from furlong.errors import CheckpointError
from furlong.models import hf_model as hf
from furlong.models.hf_config import load_config
from furlong.models.stored_tensors import TensorSource
from furlong.training.checkpoint import trainer_files
from furlong.training.megatron import weight_names as names
from furlong.training.megatron.model_build import build_chunks, initialize, transformer_config
from furlong.training.megatron.packed_layer import sequence_params
from furlong.training.megatron.parallel_layout import Layout
from furlong.training.megatron_lm.dist_files import DistReader, DistWriter
from furlong.training.megatron_lm.places import DistPlaces, common_state, empty_model, open_source
from furlong.training.ranks import Ranks

FORWARD_TOKENS = 24  # tokens of the forward comparison

logger = logging.getLogger(__name__)


class ModelWeights:
    """Reads a model folder one parameter at a time, in Megatron-core's form or Hugging Face's."""

    def __init__(self, config: Any, source: TensorSource | DistReader) -> None:
        initialize(Layout(), 0)
        self.hf = config
        self.chunks = empty_model(config, torch.float32)
        self._read: Callable[[names.Parameter], Tensor]
        if isinstance(source, DistReader):
            source.check()
            places = DistPlaces.of(self.chunks, source)
            places.check(source)
            self._read = lambda parameter: places.read(source.read, 0, parameter.ours)
        else:
            names.check_names(config, self.chunks[0].config, source)
            read_tensor = lru_cache(maxsize=1)(source.read)
            self._read = lambda parameter: names.read(parameter, read_tensor, config)

    def wholes(self, dtype: torch.dtype | None = None) -> Iterator[tuple[names.Parameter, Tensor]]:
        """Yield Megatron-core's parameters in `dtype` or as stored; expert biases always as stored."""
        for parameter in names.parameters(self.hf, self.chunks[0].config):
            whole = self._read(parameter)
            yield parameter, whole.to(dtype) if dtype is not None and parameter.rule.is_trained else whole

    def theirs(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield Hugging Face's tensors in the same dtypes."""
        return names.hf_tensors(self.wholes(dtype), self.hf)


@contextlib.contextmanager
def open_weights(folder: Path, config_folder: Path) -> Generator[ModelWeights]:
    """Open a Hugging Face folder, the `trainer` folder of a checkpoint, or a torch_dist checkpoint.

    `config_folder` has the config.json. Raises CheckpointError if it is of another model than the weights.
    """
    config = load_config(config_folder)
    with open_source(folder) as source:
        yield ModelWeights(config, source)


def write_dist(weights: ModelWeights, folder: Path, *, dtype: torch.dtype | None, iteration: int) -> int:
    """Write a torch_dist checkpoint into an existing folder, in `dtype` or as stored; returns the bytes of weights."""
    places, writer = DistPlaces.of_whole(weights.chunks[0]), DistWriter(folder)
    num_bytes = 0
    for parameter, whole in weights.wholes(dtype):
        num_bytes += whole.nbytes
        places.write(writer, 0, parameter.ours, whole)
    places.write_objects(writer)
    writer.close(common_state(weights.hf, iteration))
    return num_bytes


def write_hf(weights: ModelWeights, folder: Path, *, dtype: torch.dtype | None, companions: Path) -> int:
    """Write a Hugging Face folder, in `dtype` or as stored; returns the bytes of weights.

    config.json, tokenizer and so on are copied from `companions`.
    """
    stored = dtype or next(weights.theirs())[1].dtype
    build = partial(hf.build_empty, companions, dtype=stored)
    tensors = weights.theirs(dtype)
    return trainer_files.write_model(folder, build, tensors, Ranks(), dtype=stored, companions=companions)


def check_same(source: ModelWeights, written: ModelWeights, *, dtype: torch.dtype | None) -> int:
    """Compare the written weights with the source value by value; returns the number of tensors.

    Raises CheckpointError naming the first tensor that differs.
    """
    count = 0
    for (name, expected), (other, actual) in zip(source.theirs(dtype), written.theirs(), strict=True):
        if name != other or expected.dtype != actual.dtype or not torch.equal(expected, actual):
            raise CheckpointError(
                f"{name} differs between the source and the written folder; convert again, onto another disk"
            )
        count += 1
    return count


@torch.no_grad()
def check_forward(weights: ModelWeights, hf_folder: Path) -> float:
    """Run both models on the same few tokens in float32; returns the largest difference of their logits.

    Both models are in memory. Raises CheckpointError if the difference exceeds rounding.
    """
    config = transformer_config(weights.hf, Layout(), torch.float32)
    (model,) = build_chunks(config, weights.hf)
    local = names.local_tensors([model])
    for parameter, whole in weights.wholes():
        local[0, parameter.ours].copy_(whole)
    tokens = torch.randint(0, weights.hf.vocab_size, (FORWARD_TOKENS,), generator=torch.Generator().manual_seed(0))
    params = sequence_params(torch.tensor([0, FORWARD_TOKENS], dtype=torch.int32), FORWARD_TOKENS)
    device = next(model.parameters()).device
    ours = model.eval()(tokens[None].to(device), None, None, packed_seq_params=params)[0].float().cpu()
    theirs = hf.load_model(hf_folder)
    theirs.set_attn_implementation("eager")
    expected = theirs(tokens[None]).logits[0]
    worst = float((ours - expected).abs().max())
    size = float(expected.abs().max())
    if not worst <= 1e-3 * max(1.0, size):
        raise CheckpointError(
            f"the logits of the two models differ by {worst:.3g}, with values up to {size:.3g}; a weight rule of this "
            "family is wrong: do not train on the result, and report it"
        )
    return worst
