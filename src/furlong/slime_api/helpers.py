"""Small helpers for user functions under slime's names: tokenizers, tracing, singletons, log-probs for losses."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from furlong.errors import RolloutError, TrainerError
from furlong.models.tokenizer import load_tokenizer as read_tokenizer

T = TypeVar("T")


def load_tokenizer(name_or_path: str, **_: Any) -> Any:
    """Load the tokenizer of a folder; code of the folder is never run. Raises ConfigError."""
    return read_tokenizer(name_or_path)


def load_processor(name_or_path: str, **_: Any) -> None:
    """Return None: images, audio and video are not supported."""


def encode_image_for_rollout_engine(image: Any) -> str:  # noqa: ARG001  slime's signature
    """Raise RolloutError: images are not supported. Functions import this name for samples that have some."""
    raise RolloutError("images are not supported; train on text")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a new event loop and return its result; also from a thread whose loop is running."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    results: list[T] = []
    errors: list[BaseException] = []

    def target() -> None:
        try:
            results.append(asyncio.run(work))
        except BaseException as error:  # noqa: BLE001  raised in the calling thread
            errors.append(error)

    thread = threading.Thread(target=target, name="user-coroutine", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


class SingletonMeta(type):
    """Metaclass of classes with one instance per process."""

    _instances: dict[Any, Any] = {}  # noqa: RUF012  shared on purpose

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return the instance; it is created by the first call."""
        if cls not in SingletonMeta._instances:
            SingletonMeta._instances[cls] = super().__call__(*args, **kwargs)
        return SingletonMeta._instances[cls]

    @staticmethod
    def clear_instances() -> None:
        """Forget all instances."""
        SingletonMeta._instances.clear()


def group_by(items: Iterable[T], key: Callable[[T], Any] | None = None) -> dict[Any, list[T]]:
    """Return items by key, in the order of their first occurrence."""
    groups: dict[Any, list[T]] = defaultdict(list)
    for item in items:
        groups[item if key is None else key(item)].append(item)
    return dict(groups)


class TraceSpan:
    """A span that records nothing: furlong traces requests, rewards and training itself (`--trace`)."""

    def set(self, key: str, value: Any) -> TraceSpan:  # noqa: ARG002  slime's signature
        """Accept an attribute."""
        return self

    def update(self, attrs: Mapping[str, Any] | None) -> TraceSpan:  # noqa: ARG002
        """Accept attributes."""
        return self


@contextlib.contextmanager
def trace_span(target: Any, name: str, **_: Any) -> Generator[TraceSpan]:  # noqa: ARG001  slime's signature
    """Yield a span that records nothing."""
    yield TraceSpan()


def trace_function(name: str, **_: Any) -> Callable[[T], T]:  # noqa: ARG001
    """Return a decorator that leaves the function unchanged."""
    return lambda function: function


def build_sglang_meta_trace_attrs(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counts and times in the `meta_info` of a reply."""
    names = ("prompt_tokens", "completion_tokens", "cached_tokens", "weight_version", "e2e_latency")
    return {name: meta[name] for name in names if name in meta}


def all_gather_with_cp(tensor: T, total_length: int, response_length: int, *_layout: Any) -> T:  # noqa: ARG001
    """Return the tensor: loss hooks get the whole responses of a sample, also with context parallelism."""
    return tensor


def slice_log_prob_with_cp(log_prob: T, total_length: int, response_length: int, *_layout: Any) -> T:  # noqa: ARG001
    """Return the values: loss hooks work on whole responses, also with context parallelism."""
    return log_prob


def get_log_probs_and_entropy(
    logits: Tensor,
    *,
    args: Any,  # noqa: ARG001  the logits are already divided by the temperature
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],  # noqa: ARG001  slime's signature
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    **options: Any,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Return an empty tensor and {"log_probs", "entropy"}, each with one tensor per sample.

    logits: [R, V], as `--custom-loss-function-path` gets them. Raises TrainerError for others, and for top-p replay.
    """
    if any(value is not None for name, value in options.items() if name.startswith("top_p_")):
        raise TrainerError("get_log_probs_and_entropy: replay of top-p tokens is not supported; remove top_p_*")
    lengths = list(response_lengths)
    if logits.ndim != 2 or len(logits) != sum(lengths):
        raise TrainerError(
            f"get_log_probs_and_entropy: the logits have shape {tuple(logits.shape)}, but the responses have "
            f"{sum(lengths)} tokens; pass the logits that the loss function got"
        )
    responses = [tokens[len(tokens) - length :] for tokens, length in zip(unconcat_tokens, lengths, strict=True)]
    log_probs_RV = torch.log_softmax(logits, -1)
    values = {"log_probs": log_probs_RV.gather(-1, torch.cat(responses)[:, None]).squeeze(-1)}
    if with_entropy:
        values["entropy"] = -(log_probs_RV.exp() * log_probs_RV).sum(-1)
    return logits.new_empty(0), {name: list(value.split(lengths)) for name, value in values.items()}
