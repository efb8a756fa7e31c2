"""Loads weights into an SGLang process with quantized weights; SGLang calls `load` instead of its own loading.

SGLang's kernels want other layouts of INT4 and of FP8 per channel or tensor than a folder has. SGLang makes them once,
when it starts, and afterwards its parameters cannot be loaded. `load` therefore gives such layers loadable parameters
for the length of an update, has SGLang's own `load_weights` fill them and SGLang's own `process_weights_after_loading`
rearrange them, and copies the result into the tensors that the kernels and their CUDA graphs use.

It also compares what arrived: every parameter of a quantized layer must have been loaded, and the sum of its elements,
as integers, must be that of the tensors that were sent. Checksums of the others are compared in a last message, since
SGLang's own dequantize the whole model. An error ends the SGLang process, with its message in the log.

Servers that furlong starts with quantized weights have `--custom-weight-loader` set to `LOADER`; set it for those that
you start.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
import torch
from torch import Tensor, nn

from furlong.core.weights import NamedTensor
from furlong.transfer.device_checksum import Checksums

LOADER = "furlong.sglang_layout.quantized_loading.load"
UPDATE = "_furlong_update"  # attribute of a model during an update
CHECKSUMS = "checksums"
CONSTANT = "weight_shape"  # no kernel reads it
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def header_of(tensors: Sequence[NamedTensor], starts: Sequence[int], *, is_first: bool, is_last: bool) -> str:
    """Return the header of a bucket: name, dtype, shape, and first and last byte of each tensor in its buffer."""
    places = [
        (name, str(tensor.dtype).removeprefix("torch."), tensor.shape, start, start + tensor.nbytes)
        for (name, tensor), start in zip(tensors, starts, strict=True)
    ]
    return orjson.dumps({"is_first": is_first, "is_last": is_last, "places": places}, default=list).decode()


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
    facts = orjson.loads(header)
    if CHECKSUMS in facts:
        check(model, facts[CHECKSUMS])
        return
    if facts["is_first"]:
        setattr(model, UPDATE, Update(model))
    update = getattr(model, UPDATE, None)
    if update is None:
        raise RuntimeError("furlong's weight loader received a later bucket of an update before the first one")
    with torch.no_grad():
        update.load(facts["places"], buffer)
        if facts["is_last"]:
            delattr(model, UPDATE)
            update.finish()
    if buffer.is_cuda:  # the sender fills the buffer again once this is answered
        torch.cuda.current_stream(buffer.device).synchronize()


class Update:
    """One weight update of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layers = [layer for name, module in model.named_modules() if (layer := _layer(name, module)) is not None]
        self._dtypes = {name: each.dtype for layer in self._layers for name, each in layer.named_parameters()}
        self._sent: dict[str, Tensor] = {}  # by parameter: the sum of what was sent

    def load(self, places: Sequence[Any], buffer: Tensor) -> None:
        """Have SGLang load the tensors at these places of a buffer, and count what its loaders receive."""
        tensors = [
            (name, buffer[begin:end].view(getattr(torch, dtype)).view(tuple(shape)))
            for name, dtype, shape, begin, end in places
            if not name.endswith(CONSTANT)
        ]
        blocks = {_block_of(name) for name, _ in tensors}
        layers = [layer for layer in self._layers if (block := _block_of(layer.name)) is None or block in blocks]
        with _loadable(layers):
            self._model.load_weights(tensors)  # pyright: ignore[reportCallIssue]  SGLang's
        # in the precision of the parameters: scales may be sent in float32
        loaded = [(name, tensor.to(self._dtypes[name])) for layer in layers for name, tensor in layer.take_loaded()]
        for name, total in integer_sums(loaded).items():
            self._sent[name] = self._sent[name] + total if name in self._sent else total

    def finish(self) -> None:
        """Compare what was loaded, and rearrange the layers."""
        missing = [name for name in self._dtypes if name not in self._sent]
        if missing:
            raise RuntimeError(f"{len(missing)} quantized parameters were not loaded: {', '.join(missing[:3])}")
        loaded = integer_sums([each for layer in self._layers if layer.is_whole for each in layer.named_parameters()])
        for layer in self._layers:
            layer.rearrange()
        differences = (
            torch.stack([self._sent[name] - total for name, total in loaded.items()]).tolist() if loaded else []
        )
        wrong = [name for name, difference in zip(loaded, differences, strict=True) if difference]
        if wrong:
            names = ", ".join(wrong[:3])
            raise RuntimeError(f"{len(wrong)} quantized parameters differ from what was sent: {names}")


@dataclass
class QuantizedLayer:
    """A quantized layer during an update.

    parameters: those to load. is_staged: they take the place of the kernels' own while something is loaded.
    """

    name: str
    module: Any
    parameters: dict[str, nn.Parameter] = field(default_factory=dict[str, nn.Parameter])
    is_staged: bool = False
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
        module = self.module
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


def integer_sums(tensors: Sequence[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return the sum of the elements read as integers, by name, over all tensors of a name.

    It does not depend on their order. Tensors of one size are summed together: a mixture of experts has thousands of
    them.
    """
    alike: dict[tuple[torch.dtype, int], list[tuple[str, Tensor]]] = {}
    for name, tensor in tensors:
        integers = tensor.detach().contiguous().view(-1).view(INTEGERS[tensor.itemsize])
        alike.setdefault((integers.dtype, len(integers)), []).append((name, integers))
    totals: dict[str, Tensor] = {}
    for some in alike.values():
        rows = some[0][1][None] if len(some) == 1 else torch.stack([integers for _, integers in some])
        for (name, _), total in zip(some, rows.sum(1, dtype=torch.int64).unbind(), strict=True):
            totals[name] = totals[name] + total if name in totals else total
    return totals


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
