"""Loads weights into an SGLang process with quantized weights; SGLang calls `load` in place of its own loading.

SGLang's kernels want other layouts of INT4 and of FP8 per channel or tensor than a folder has. SGLang makes them once,
when it starts, and afterwards its parameters cannot be loaded. `load` therefore gives such layers loadable parameters
for the length of an update, has SGLang's own `load_weights` fill them and SGLang's own `process_weights_after_loading`
rearrange them, and copies the result into the tensors that the kernels and their CUDA graphs use.

It also compares what arrived: every parameter of a quantized layer must have been loaded, and the sum of its elements,
as integers, must be that of the tensors that were sent. Checksums of the others are compared in a last message, since
SGLang's own dequantize the whole model. An error ends the SGLang process, with its message in the log.

What SGLang copies for a bucket is recorded in the first update and repeated in later ones (`copy_plan`). These also
rearrange a layer as soon as the last bucket with tensors of it was loaded, while the sender reads the next one.

Servers that furlong starts with quantized weights have `--custom-weight-loader` set to `LOADER`; set it for those that
you start.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
import torch
from torch import Tensor, nn

from furlong.core.weights import NamedTensor
from furlong.sglang_layout.copy_plan import CopyPlan, CopyRecorder
from furlong.transfer.device_checksum import Checksums

LOADER = "furlong.sglang_layout.quantized_loading.load"
UPDATE = "_furlong_update"  # attribute of a model during an update
CHECKSUMS = "checksums"
PLAN = "_furlong_plan"  # attribute of a model between updates
CONSTANT = "weight_shape"  # no kernel reads it
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def header_of(tensors: Sequence[NamedTensor], starts: Sequence[int], *, is_first: bool, is_last: bool) -> str:
    """Return the header of a bucket: a line of JSON with these facts, and one with the tensors' places in its buffer.

    A place is name, dtype, shape, and first and last byte.
    """
    places = [
        (name, str(tensor.dtype).removeprefix("torch."), tensor.shape, start, start + tensor.nbytes)
        for (name, tensor), start in zip(tensors, starts, strict=True)
    ]
    facts = orjson.dumps({"is_first": is_first, "is_last": is_last})
    return b"\n".join([facts, orjson.dumps(places, default=list)]).decode()


def check_header_of(checksums: Mapping[str, Sequence[str]]) -> str:
    """Return the header of a message without tensors: the checksums that are right for each unquantized tensor."""
    return orjson.dumps({CHECKSUMS: checksums}).decode()


def check(model: nn.Module, right: Mapping[str, Sequence[str]]) -> None:
    """Compare tensors of the model with their checksums. Raises RuntimeError that names those that differ."""
    sums = Checksums()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in right:
            sums.add(name, [tensor.detach()])
    loaded = sums.digests()
    wrong = [name for name, digests in right.items() if loaded.get(name) not in digests]
    if wrong:
        raise RuntimeError(f"{len(wrong)} tensors differ from what was sent: {', '.join(wrong[:3])}")


def load(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Load one bucket: a header (`header_of`) and its buffer of bytes; or check checksums (`check_header_of`).

    Raises RuntimeError if weights do not arrive, or differ.
    """
    [(header, buffer)] = named_tensors
    facts = orjson.loads(header.partition("\n")[0])
    if CHECKSUMS in facts:
        check(model, facts[CHECKSUMS])
        return
    if facts["is_first"]:
        setattr(model, UPDATE, Update(model))
    update = getattr(model, UPDATE, None)
    if update is None:
        raise RuntimeError("furlong's weight loader received a later bucket of an update before the first one")
    with torch.no_grad():
        update.load(header, buffer)
        if facts["is_last"]:
            delattr(model, UPDATE)
            update.finish()
    if buffer.is_cuda:  # the sender fills the buffer again once this is answered
        torch.cuda.current_stream(buffer.device).synchronize()


@dataclass(frozen=True)
class Place:
    """Where a buffer has a tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    def tensor(self, buffer: Tensor) -> Tensor:
        """Return the tensor."""
        return buffer[self.begin : self.end].view(self.dtype).view(self.shape)


def places_in(header: str) -> list[Place]:
    """Return the places of the tensors that are loaded."""
    read = orjson.loads(header.partition("\n")[2])
    return [
        Place(name, getattr(torch, dtype), tuple(shape), begin, end)
        for name, dtype, shape, begin, end in read
        if not name.endswith(CONSTANT)
    ]


@dataclass(frozen=True)
class BucketPlan:
    """How to load a bucket again. `counted`: what its sums count, each under the name of a parameter."""

    copies: CopyPlan
    counted: Sequence[Place]


@dataclass(frozen=True)
class UpdatePlan:
    """What was recorded of an update: the buckets by header, in order, and the last one with tensors of each layer."""

    buckets: Mapping[str, BucketPlan | None] = field(default_factory=dict[str, BucketPlan | None])
    last_of: Mapping[str, str] = field(default_factory=dict[str, str])


class Update:
    """One weight update of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layers = [layer for name, module in model.named_modules() if (layer := _layer(name, module)) is not None]
        self._parameters: dict[str, Tensor] = {name: each.data for name, each in model.named_parameters()}
        for layer in self._layers:
            self._parameters |= {name: each.data for name, each in layer.named_parameters()}
        self._layer_of = {name: layer.name for layer in self._layers for name, _ in layer.named_parameters()}
        self._sent: dict[str, Tensor] = {}  # by parameter: the sum of what was sent
        self._loaded: dict[str, Tensor] = {}  # the same of what was loaded, of layers that are rearranged
        self._plan: UpdatePlan = getattr(model, PLAN, UpdatePlan())
        self._used: dict[str, BucketPlan | None] = {}
        self._last_of: dict[str, str] = {}

    def load(self, header: str, buffer: Tensor) -> None:
        """Load a bucket, by the plan for its header if there is one."""
        plan = self._plan.buckets.get(header)
        if plan is not None and plan.copies.fits(self._parameters):
            plan.copies.run(buffer, self._parameters)
            counted = [(place.name, place.tensor(buffer)) for place in plan.counted]
        elif header in self._plan.buckets and plan is None:
            counted = self._load_by_sglang(places_in(header), buffer)
        else:
            places = places_in(header)
            with CopyRecorder(buffer, self._parameters) as recorder:
                counted = self._load_by_sglang(places, buffer)
            copies = recorder.plan([(place.begin, place.end) for place in places])
            plan = None if copies is None else _bucket_plan(copies, counted, buffer)
        self._used[header] = plan
        for name, total in integer_sums(self._in_stored_precision(counted)).items():
            self._sent[name] = self._sent[name] + total if name in self._sent else total
        self._note_layers(header, {self._layer_of[name] for name, _ in counted})

    def _note_layers(self, header: str, names: Collection[str]) -> None:
        """Rearrange the layers that a bucket completes, if all buckets so far came as in the update before."""
        self._last_of |= dict.fromkeys(names, header)
        if all(one == other for one, other in zip(self._used, self._plan.buckets, strict=False)):
            self._rearrange([layer for layer in self._layers if self._plan.last_of.get(layer.name) == header])

    def _rearrange(self, layers: Sequence[QuantizedLayer]) -> None:
        self._loaded |= integer_sums([each for layer in layers if layer.is_whole for each in layer.named_parameters()])
        for layer in layers:
            layer.rearrange()

    def _load_by_sglang(self, places: Sequence[Place], buffer: Tensor) -> list[tuple[str, Tensor]]:
        """Have SGLang load the tensors; return what it gave to the loaders of which quantized parameters."""
        tensors = [(place.name, place.tensor(buffer)) for place in places]
        blocks = {_block_of(name) for name, _ in tensors}
        layers = [layer for layer in self._layers if (block := _block_of(layer.name)) is None or block in blocks]
        with _loadable(layers):
            self._model.load_weights(tensors)  # pyright: ignore[reportCallIssue]  SGLang's
        return [part for layer in layers for part in layer.take_loaded()]

    def _in_stored_precision(self, counted: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Return tensors in the precision of their parameters: scales may be sent in float32."""
        return [(name, tensor.to(self._parameters[name].dtype)) for name, tensor in counted]

    def finish(self) -> None:
        """Rearrange the layers that are left, and compare what was loaded."""
        setattr(self._model, PLAN, UpdatePlan(self._used, self._last_of))
        missing = [name for name in self._layer_of if name not in self._sent]
        if missing:
            raise RuntimeError(f"{len(missing)} quantized parameters were not loaded: {', '.join(missing[:3])}")
        self._rearrange([layer for layer in self._layers if not layer.is_rearranged])
        loaded = self._loaded
        differences = (
            torch.stack([self._sent[name] - total for name, total in loaded.items()]).tolist() if loaded else []
        )
        wrong = [name for name, difference in zip(loaded, differences, strict=True) if difference]
        if wrong:
            names = ", ".join(wrong[:3])
            raise RuntimeError(f"{len(wrong)} quantized parameters differ from what was sent: {names}")


def _bucket_plan(copies: CopyPlan, counted: Sequence[tuple[str, Tensor]], buffer: Tensor) -> BucketPlan | None:
    """Return the plan of a bucket; None if something else than whole tensors of it is to be counted.

    Tensors that follow each other in the buffer and count for the same parameter become one place.
    """
    memory = buffer.untyped_storage().data_ptr()
    if not all(each.untyped_storage().data_ptr() == memory and each.is_contiguous() for _, each in counted):
        return None
    places: list[Place] = []
    for name, each in sorted(counted, key=lambda pair: pair[1].data_ptr()):
        begin, end = each.data_ptr() - buffer.data_ptr(), each.data_ptr() - buffer.data_ptr() + each.nbytes
        if places and (places[-1].name, places[-1].dtype, places[-1].end) == (name, each.dtype, begin):
            begin = places.pop().begin
        places.append(Place(name, each.dtype, ((end - begin) // each.itemsize,), begin, end))
    return BucketPlan(copies, places)


@dataclass
class QuantizedLayer:
    """A quantized layer during an update.

    parameters: those to load. is_staged: they take the place of the kernels' own while something is loaded.
    is_rearranged: nothing can be loaded any more.
    """

    name: str
    module: Any
    parameters: dict[str, nn.Parameter] = field(default_factory=dict[str, nn.Parameter])
    is_staged: bool = False
    is_rearranged: bool = False
    _loaders: dict[str, Callable[..., None]] = field(default_factory=dict[str, Callable[..., None]])
    _loaded: list[tuple[str, Tensor]] = field(default_factory=list[tuple[str, Tensor]])

    def prepare(self) -> None:
        """Make the parameters to load."""
        module = self.module
        if hasattr(_scheme(module), "restore_weights_before_loading"):  # experts, whose tensors change in place
            _scheme(module).restore_weights_before_loading(module)
        elif not all(_weight_loader(each) for each in _own(module).values()):
            self.is_staged = True
            before, attributes = dict(module._parameters), _attributes(module)
            _create_weights(module)
            self.parameters = _own(module)
            _restore(module, before, attributes)
        if not self.is_staged:
            self.parameters = {name: each for name, each in _own(module).items() if _weight_loader(each)}
        self._loaders = {name: _weight_loader(each) for name, each in self.parameters.items()}  # pyright: ignore

    def begin(self) -> dict[str, nn.Parameter | None]:
        """Let SGLang load the parameters; returns those of the kernels."""
        before = dict(self.module._parameters)
        for name, parameter in self.parameters.items():
            _set_weight_loader(parameter, self._counting(name))
            if self.is_staged:
                self.module._parameters[name] = parameter
        return before

    def end(self, before: dict[str, nn.Parameter | None]) -> None:
        """Undo `begin`."""
        for name, parameter in self.parameters.items():
            _set_weight_loader(parameter, self._loaders[name])
        if self.is_staged:
            _restore(self.module, before, {})

    def _counting(self, name: str) -> Callable[..., None]:
        def load_and_count(parameter: nn.Parameter, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
            if self.is_rearranged:
                raise RuntimeError(
                    f"tensors of {self.name} came in another order than in the update before, after it was complete; "
                    "restart the server"
                )
            self._loaded.append((f"{self.name}.{name}", tensor))
            self._loaders[name](parameter, tensor, *args, **kwargs)

        return load_and_count

    def take_loaded(self) -> list[tuple[str, Tensor]]:
        """Return the parameters and tensors that were loaded since the last call."""
        loaded, self._loaded = self._loaded, []
        return loaded

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters to load."""
        return ((f"{self.name}.{name}", parameter) for name, parameter in self.parameters.items())

    @property
    def is_whole(self) -> bool:
        """Whether this process has all of the layer, so that sums can be compared."""
        sizes = ("tp_size", "moe_tp_size", "moe_ep_size")
        return all(getattr(self.module, size, 1) in (1, None) for size in sizes)

    def rearrange(self) -> None:
        """Have SGLang rearrange what was loaded, into the tensors that the kernels use."""
        module, self.is_rearranged = self.module, True
        before, attributes = dict(module._parameters), _attributes(module)
        scheme = _scheme(module)
        of_scheme = dict(vars(scheme))
        if self.is_staged:
            module._parameters.update(self.parameters)
        with _scales_permuted_at_once(scheme):
            module.quant_method.process_weights_after_loading(module)
        for name, old in before.items():
            new = getattr(module, name, None)
            if old is not None and new is not None and new is not old and new.data_ptr() != old.data_ptr():
                old.data.copy_(new.data)
        _restore(module, before, attributes)
        vars(scheme).update(of_scheme)
        for holder in (module, scheme):  # locks of kernels; releasing memory does not keep their zeros
            if isinstance(workspace := getattr(holder, "workspace", None), Tensor):
                workspace.zero_()


@contextmanager
def _scales_permuted_at_once(scheme: Any) -> Generator[None]:
    """Let SGLang permute the INT4 scales of all experts of a layer at once, as it does those of a linear layer.

    Its own function does so expert by expert, which takes most of the time of an update. Each permuted row is one of
    the result, whichever expert it is of.
    """
    module = sys.modules[type(scheme).__module__]
    own = getattr(module, "marlin_moe_permute_scales", None)
    if own is None:
        yield
        return
    permute = importlib.import_module("sglang.srt.layers.quantization.marlin_utils").marlin_permute_scales

    def permute_all(s: Tensor, size_k: int, size_n: int, group_size: int) -> Tensor:
        return permute(s.reshape(-1, s.shape[-1]), size_k, size_n, group_size).view(s.shape)

    module.marlin_moe_permute_scales = permute_all  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        module.marlin_moe_permute_scales = own  # pyright: ignore[reportAttributeAccessIssue]


def integer_sum(tensor: Tensor) -> Tensor:
    """Return the sum of the elements, read as integers; it does not depend on their order."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(INTEGERS[tensor.itemsize]).sum(dtype=torch.int64)


def integer_sums(tensors: Sequence[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return `integer_sum` by name, added up where a name has several tensors, with few launches on a GPU."""
    places = {name: place for place, name in enumerate(dict.fromkeys(name for name, _ in tensors))}
    if not places:
        return {}
    sums = torch.zeros(len(places), dtype=torch.int64, device=tensors[0][1].device)
    left = list(tensors)
    if sums.is_cuda:
        from furlong.sglang_layout.integer_sum_kernel import add_sums, can_sum

        for size in INTEGERS:
            some = [(name, each) for name, each in tensors if each.itemsize == size and can_sum(each)]
            add_sums(sums, [each for _, each in some], [places[name] for name, _ in some])
        left = [(name, each) for name, each in tensors if not can_sum(each)]
    for name, each in left:
        sums[places[name]] += integer_sum(each)
    return dict(zip(places, sums.unbind(), strict=True))


def _block_of(name: str) -> int | None:
    """Return the first number in a name, which is that of a transformer block; None without one."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


@contextmanager
def _loadable(layers: Sequence[QuantizedLayer]) -> Generator[None]:
    before = [layer.begin() for layer in layers]
    try:
        yield
    finally:
        for layer, parameters in zip(layers, before, strict=True):
            layer.end(parameters)


def _layer(name: str, module: Any) -> QuantizedLayer | None:
    method = getattr(module, "quant_method", None)
    has_weights = hasattr(module, "output_size") or hasattr(module, "moe_runner_config")  # linear layer, or experts
    if method is None or not has_weights or type(method).__name__.startswith("Unquantized"):
        return None
    layer = QuantizedLayer(name, module)
    layer.prepare()
    return layer


def _own(module: Any) -> dict[str, nn.Parameter]:
    """Return the parameters of a module without its bias and empty ones."""
    return {
        name: each
        for name, each in module._parameters.items()
        if each is not None and each.numel() and not name.endswith(("bias", CONSTANT))
    }


def _scheme(module: Any) -> Any:
    return getattr(module, "scheme", None) or module.quant_method


def _attributes(module: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if not name.startswith("_")}


def _restore(module: Any, parameters: Mapping[str, nn.Parameter | None], attributes: Mapping[str, Any]) -> None:
    module._parameters.clear()
    module._parameters.update(parameters)
    vars(module).update(attributes)


def _weight_loader(parameter: Any) -> Callable[..., None] | None:
    return getattr(parameter, "weight_loader", None)


def _set_weight_loader(parameter: Any, loader: Callable[..., None]) -> None:
    setattr(parameter, "_weight_loader" if hasattr(parameter, "_weight_loader") else "weight_loader", loader)


def _create_weights(layer: Any) -> None:
    linear = importlib.import_module("sglang.srt.layers.linear")
    is_v2 = type(layer.quant_method).__name__ in linear.WEIGHT_LOADER_V2_SUPPORTED
    with torch.device(next(iter(_own(layer).values())).device):
        layer.quant_method.create_weights(
            layer=layer,
            input_size_per_partition=getattr(layer, "input_size_per_partition", layer.input_size),
            output_partition_sizes=getattr(layer, "output_partition_sizes", [layer.output_size]),
            input_size=layer.input_size,
            output_size=layer.output_size,
            params_dtype=layer.params_dtype,
            skip_block_quant_check=True,
            weight_loader=layer.weight_loader_v2 if is_v2 else layer.weight_loader,
        )
