"""Hugging Face folders from checkpoints that train, and checkpoints of Megatron-LM from Hugging Face folders.

One process does it, on the CPU, and holds one parameter at a time. What was written is read again and compared.
"""

from __future__ import annotations

# Megatron-core's annotations are not what its functions take and return.
# pyright: reportAttributeAccessIssue=false
import contextlib
import logging
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from furlong.errors import CheckpointError
from furlong.models import hf_model as hf
from furlong.models.stored_tensors import Stored, open_tensors
from furlong.training.checkpoint import tensor_files
from furlong.training.checkpoint import trainer_state as state
from furlong.training.checkpoint.dist_files import DistReader, DistWriter, is_dist_folder
from furlong.training.megatron import weight_names as names
from furlong.training.megatron.megatron_lm.torch_dist import DistPlaces, common_state, empty_model
from furlong.training.megatron.model_build import build_chunks, initialize, transformer_config
from furlong.training.megatron.packed_batch import sequence_params
from furlong.training.megatron.parallel_layout import Compute, Layout
from furlong.training.ranks import Ranks

FORWARD_TOKENS = 24  # that both models are run on

logger = logging.getLogger(__name__)


class Weights:
    """The parameters of a model in a folder, one at a time as Megatron-core has them and as Hugging Face has them."""

    def __init__(self, config: Any, stored: Stored | None, files: DistReader | None) -> None:
        initialize(Layout(), 0)
        self.hf, self._stored, self._files = config, stored, files
        self.chunks = empty_model(config, torch.float32)
        if stored is not None:
            names.check_names(config, self.chunks[0].config, stored)
        if files is not None:
            files.check()
            self._places = DistPlaces.of(self.chunks, files)
            self._places.check(files)

    def wholes(self, dtype: torch.dtype | None = None) -> Iterator[tuple[names.Parameter, Tensor]]:
        """Each parameter of Megatron-core's, in `dtype` or as stored; biases of routers' choices always as stored."""
        kept = None if self._stored is None else names.CachedReader(self._stored)
        for parameter in names.parameters(self.hf, self.chunks[0].config):
            if self._files is not None:
                whole = self._places.read(self._files.read, 0, parameter.ours)
            else:
                assert kept is not None
                whole = names.read(parameter, kept.read, names.HeadShape.of(self.hf))
            yield parameter, whole.to(dtype) if dtype is not None and parameter.rule.is_trained else whole

    def theirs(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Each tensor of Hugging Face's, in the same dtypes."""
        return names.hf_tensors(self.wholes(dtype), self.hf)


@contextlib.contextmanager
def open_weights(folder: Path, config_folder: Path) -> Generator[Weights]:
    """Open a Hugging Face folder, the `trainer` folder of a checkpoint, or one of torch_dist.

    `config_folder` has the config.json. Raises CheckpointError if it is of another model than the weights.
    """
    config = hf.load_config(config_folder)
    if is_dist_folder(folder):
        yield Weights(config, None, DistReader(folder))
    elif (folder / state.META).is_file():
        yield Weights(config, state.reader(folder, state.read_meta(folder), state.WEIGHTS), None)
    else:
        with open_tensors(folder) as stored:
            yield Weights(config, stored, None)


def write_dist(weights: Weights, folder: Path, *, dtype: torch.dtype | None, iteration: int) -> int:
    """Write a torch_dist folder, in `dtype` or as stored; returns the bytes of its weights. The folder is there."""
    places, writer = DistPlaces.of_whole(weights.chunks[0]), DistWriter(folder)
    num_bytes = 0
    for parameter, whole in weights.wholes(dtype):
        num_bytes += whole.nbytes
        places.write(writer, 0, parameter.ours, whole)
    places.write_objects(writer)
    writer.close(common_state(weights.hf, iteration))
    return num_bytes


def write_hf(weights: Weights, folder: Path, *, dtype: torch.dtype | None, companions: Path) -> int:
    """Write a folder that transformers loads, in `dtype` or as stored; returns the bytes of its weights.

    config.json, the tokenizer and so on are those of `companions`.
    """
    stored = dtype or next(weights.theirs())[1].dtype
    build = partial(hf.build_empty, companions, dtype=stored)
    tensors = weights.theirs(dtype)
    return tensor_files.write_model(folder, build, tensors, Ranks(), dtype=stored, companions=companions)


def check_same(source: Weights, written: Weights, *, dtype: torch.dtype | None) -> int:
    """Compare what was written with what it was made of, value by value; returns the number of tensors.

    Raises CheckpointError naming the first that differs.
    """
    count = 0
    for (name, wanted), (other, found) in zip(source.theirs(dtype), written.theirs(), strict=True):
        if name != other or wanted.dtype != found.dtype or not torch.equal(wanted, found):
            raise CheckpointError(f"{name} was not written as it was read; convert again, onto another disk")
        count += 1
    return count


@torch.no_grad()
def check_forward(weights: Weights, hf_folder: Path) -> float:
    """Run both models on the same few tokens in float32; returns the largest difference of their logits.

    Both are in memory, whole. Raises CheckpointError if the difference is more than rounding.
    """
    config = transformer_config(weights.hf, Layout(), torch.float32, compute=Compute())
    (model,) = build_chunks(config, weights.hf)
    own = names.local_tensors([model])
    for parameter, whole in weights.wholes():
        own[0, parameter.ours].copy_(whole)
    tokens = torch.randint(0, weights.hf.vocab_size, (FORWARD_TOKENS,), generator=torch.Generator().manual_seed(0))
    params = sequence_params(torch.tensor([0, FORWARD_TOKENS], dtype=torch.int32), FORWARD_TOKENS)
    device = next(model.parameters()).device
    ours = model.eval()(tokens[None].to(device), None, None, packed_seq_params=params)[0].float().cpu()
    theirs = hf.load_model(hf_folder)
    theirs.set_attn_implementation("eager")
    wanted = theirs(tokens[None]).logits[0]
    worst = float((ours - wanted).abs().max())
    size = float(wanted.abs().max())
    if not worst <= 1e-3 * max(1.0, size):
        raise CheckpointError(
            f"the logits of the two models differ by {worst:.3g}, where they are up to {size:.3g}; "
            "a rule of this family is wrong: do not train on the result, and report it"
        )
    return worst
