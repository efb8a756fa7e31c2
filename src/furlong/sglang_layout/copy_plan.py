"""Records the copies with which SGLang loads a bucket of weights, to repeat them in later updates.

SGLang's `load_weights` is a loop in Python over tensors, which for a mixture of experts also searches the names of all
experts for each. What it does is the same in every update: it copies parts of the bucket to parts of parameters, and
fills padding. A `CopyPlan` repeats that, with one operation for copies that follow each other at regular distances,
such as those of the experts of a layer.

A bucket has no plan if its loading does anything else, or if nothing of a tensor is copied. SGLang then loads it in
every update.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Layout = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]
"""Precision, shape and strides of a tensor."""


@dataclass(frozen=True)
class Copy:
    """A copy from a bucket to a parameter. `begin` and `first` are in bytes, from the start of either."""

    begin: int
    source: Layout
    name: str
    first: int
    target: Layout

    def run(self, buffer: Tensor, parameter: Tensor) -> None:
        """Repeat it."""
        _view(parameter, self.first, self.target).copy_(_view(buffer, self.begin, self.source))


@dataclass(frozen=True)
class Fill:
    """A part of a parameter, from byte `first` on, that is set to a value."""

    name: str
    first: int
    target: Layout
    value: float


@dataclass(frozen=True)
class CopyPlan:
    """The copies of a bucket, and the layouts of the parameters that they were recorded for."""

    copies: Sequence[Copy]
    fills: Sequence[Fill]
    layouts: Mapping[str, Layout]

    def fits(self, parameters: Mapping[str, Tensor]) -> bool:
        """Whether the parameters still have these layouts."""
        return all(name in parameters and layout_of(parameters[name]) == each for name, each in self.layouts.items())

    def run(self, buffer: Tensor, parameters: Mapping[str, Tensor]) -> None:
        """Copy a bucket into the parameters."""
        for each in self.copies:
            each.run(buffer, parameters[each.name])
        for fill in self.fills:
            _view(parameters[fill.name], fill.first, fill.target).fill_(fill.value)


class CopyRecorder(TorchDispatchMode):
    """Records what is done with views of a bucket while it is active.

    Args:
        buffer: The bytes of the bucket.
        parameters: Those that may be copied to, by name. Names of the same memory are interchangeable.
    """

    def __init__(self, buffer: Tensor, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._buffer, self._parameters = buffer, parameters
        ordered = sorted((each.data_ptr(), name) for name, each in parameters.items() if each.numel())
        self._starts, self._names = [start for start, _ in ordered], [name for _, name in ordered]
        self._copies: list[Copy] = []
        self._fills: list[Fill] = []
        self._clones: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # by address: a clone and the part of the bucket that it has
        self._is_plain = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and record it."""
        del types
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self._record_copy(args[0], args[1])
        elif func is torch.ops.aten.fill_.Scalar:
            self._record_fill(args[0], args[1])
        elif func is torch.ops.aten.clone.default and self._source_of(args[0]) is not None:
            self._clones[result.untyped_storage().data_ptr()] = result, args[0]
        elif not _is_view(func):
            self._is_plain = False
        return result

    def plan(self, ranges: Sequence[tuple[int, int]]) -> CopyPlan | None:
        """Return the plan, given first and last byte of each tensor of the bucket; None if there can be none."""
        copied = sorted(each.begin for each in self._copies)
        if not self._is_plain or not all(_has_any(copied, begin, end) for begin, end in ranges):
            return None
        if len({(each.name, each.first) for each in self._copies}) < len(self._copies):
            return None  # the order matters
        names = {each.name for each in (*self._copies, *self._fills)}
        return CopyPlan(
            merged(self._copies), self._fills, {name: layout_of(self._parameters[name]) for name in sorted(names)}
        )

    def _record_copy(self, target: Tensor, source: Tensor) -> None:
        found, place = self._source_of(source), self._place_of(target)
        if found is None or place is None or any(each.name == place[0] for each in self._fills):
            self._is_plain = False
        else:
            self._copies.append(Copy(*found, *place, layout_of(target)))

    def _source_of(self, tensor: Tensor) -> tuple[int, Layout] | None:
        """Return where the bucket has these elements, also of a part of a clone; None if it has not."""
        if (begin := _offset(tensor, self._buffer)) is not None:
            return begin, layout_of(tensor)
        clone, original = self._clones.get(tensor.untyped_storage().data_ptr(), (None, None))
        if clone is None or original is None or (tensor.dtype, tensor.stride()) != (clone.dtype, clone.stride()):
            return None
        index = _index_of(int(tensor.storage_offset() - clone.storage_offset()), clone.stride())
        begin = _offset(original, self._buffer)
        if begin is None or index is None or len(index) != original.dim():
            return None
        begin += sum(i * stride for i, stride in zip(index, original.stride(), strict=True)) * original.itemsize
        return begin, (original.dtype, tuple(tensor.shape), original.stride())

    def _record_fill(self, target: Tensor, value: float) -> None:
        if not target.numel():
            return
        if (place := self._place_of(target)) is None:
            self._is_plain = False
        else:
            self._fills.append(Fill(*place, layout_of(target), value))

    def _place_of(self, target: Tensor) -> tuple[str, int] | None:
        """Return the parameter that this is a part of, and at which byte of it; None if there is none."""
        index = bisect.bisect(self._starts, target.data_ptr()) - 1
        if index < 0 or (first := _offset(target, self._parameters[self._names[index]])) is None:
            return None
        return self._names[index], first


def merged(copies: Sequence[Copy]) -> list[Copy]:
    """Return the same copies in fewer operations: those that differ by constant distances only become one.

    Gate and up projections of an expert become one operation first, then those of all experts.
    """
    while len(fewer := _merged_once(copies)) < len(copies):
        copies = fewer
    return fewer


def _merged_once(copies: Sequence[Copy]) -> list[Copy]:
    alike: dict[tuple[Any, ...], list[Copy]] = {}
    for each in copies:
        alike.setdefault((each.name, each.source, each.target), []).append(each)
    result: list[Copy] = []
    for some in alike.values():
        begun = 0
        while begun < len(some):
            count = _regular(some[begun:])
            result.append(_joined(some[begun : begun + count]))
            begun += count
    return result


def _regular(copies: Sequence[Copy]) -> int:
    """Return how many of these copies, from the first on, have constant distances of whole elements."""
    if len(copies) < 2:
        return len(copies)
    step = _distance(copies[0], copies[1])
    if step[0] % copies[0].source[0].itemsize or step[1] % copies[0].target[0].itemsize or min(step) <= 0:
        return 1
    count = 2
    while count < len(copies) and _distance(copies[count - 1], copies[count]) == step:
        count += 1
    return count


def _distance(one: Copy, other: Copy) -> tuple[int, int]:
    return other.begin - one.begin, other.first - one.first


def _joined(copies: Sequence[Copy]) -> Copy:
    """Return regular copies as one, with another dimension in front."""
    first = copies[0]
    if len(copies) == 1:
        return first
    source_step, target_step = _distance(first, copies[1])
    return replace(
        first,
        source=_stacked(first.source, len(copies), source_step),
        target=_stacked(first.target, len(copies), target_step),
    )


def _stacked(layout: Layout, count: int, step: int) -> Layout:
    dtype, shape, strides = layout
    return dtype, (count, *shape), (step // dtype.itemsize, *strides)


def layout_of(tensor: Tensor) -> Layout:
    """Return the layout of a tensor."""
    return tensor.dtype, tuple(tensor.shape), tensor.stride()


def _view(tensor: Tensor, first: int, layout: Layout) -> Tensor:
    dtype, shape, strides = layout
    if tensor.dtype != dtype:
        tensor = tensor.view(dtype)
    return tensor.as_strided(shape, strides, tensor.storage_offset() + first // dtype.itemsize)


def _offset(view: Tensor, tensor: Tensor) -> int | None:
    """Return at which byte of a tensor's memory a view of it begins; None if it is no view of it."""
    distance = view.data_ptr() - tensor.data_ptr()
    is_inside = view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() and distance >= 0
    return distance if is_inside and distance < max(_extent(tensor), 1) else None


def _index_of(offset: int, strides: Sequence[int]) -> list[int] | None:
    """Return the index of the element at an offset of a contiguous tensor; None if the strides are not descending."""
    if list(strides) != sorted(strides, reverse=True) or 0 in strides:
        return None
    index: list[int] = []
    for stride in strides:
        index.append(offset // stride)
        offset %= stride
    return index


def _extent(tensor: Tensor) -> int:
    if not tensor.numel():
        return 0
    return (
        1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    ) * tensor.itemsize


def _has_any(ordered: Sequence[int], begin: int, end: int) -> bool:
    """Whether one of these numbers, in ascending order, is in a range."""
    place = bisect.bisect_left(ordered, begin)
    return begin == end or (place < len(ordered) and ordered[place] < end)


def _is_view(func: Any) -> bool:
    schema = func._schema
    returned = schema.returns[0].alias_info if schema.returns else None
    return returned is not None and not returned.is_write and not schema.is_mutable
