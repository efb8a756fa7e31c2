"""Which weights of a model are quantized, and how: read from `quantization_config` and the names of stored tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from furlong.core.text import abbreviate
from furlong.core.weights import NamedTensor, WeightSource
from furlong.errors import ConfigError, SyncError
from furlong.quantization.calibrated import AWQ_BITS, CALIBRATED, AwqGroups, GptqGroups
from furlong.quantization.fp8 import Fp8Blocks, Fp8Scaled
from furlong.quantization.ignore_list import module_of
from furlong.quantization.int4 import Int4Groups
from furlong.quantization.weight_format import (
    WEIGHT,
    WEIGHT_SHAPE,
    Check,
    QuantizationError,
    WeightFormat,
    check_finite,
    parts_of,
    quantize_stacked,
)

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I32": torch.int32, "I64": torch.int64}
PARTS = frozenset(  # besides `weight`
    (
        *("weight_packed", "weight_scale_inv", "weight_scale", "weight_shape"),
        *("qweight", "qzeros", "scales", "g_idx"),  # of AWQ and GPTQ
    )
)
STACK_BYTES = 256 << 20  # of weights that are quantized together: enough that launches cost little
PACKED = (".weight_packed", ".qweight")  # ends of the names of parts with a weight's integers
SUPPORTED = (
    "furlong reads FP8 (E4M3, `quant_method` fp8 or compressed-tensors' float-quantized), INT4 (compressed-tensors' "
    "pack-quantized, symmetric, in groups), and, for engines without weight updates, AWQ and GPTQ"
)


@dataclass
class _Stack:
    """Weights of one width that are quantized together; `rows` remain of them afterwards."""

    names: list[str] = field(default_factory=list[str])
    weights: list[Tensor] = field(default_factory=list[Tensor])
    rows: list[int] = field(default_factory=list[int])
    num_bytes: int = 0

    def add(self, name: str, weight: Tensor) -> None:
        self.names.append(name)
        self.weights.append(weight)
        self.num_bytes += weight.nbytes


@dataclass(frozen=True)
class QuantizationScheme:
    """How a folder stores its quantized weights.

    form: format of all of them. names: their names, as in `model.layers.0.mlp.up_proj.weight`. dtype: precision of
    the others; a weight is rounded to it before it is quantized, so that an update equals a converted folder.
    """

    form: WeightFormat
    names: frozenset[str]
    dtype: torch.dtype

    @property
    def is_fixed(self) -> bool:
        """Whether weights are only read from the format, so that engines with it cannot be updated."""
        return isinstance(self.form, CALIBRATED)

    def part_names(self, name: str) -> list[str]:
        """Return the names of the stored tensors of a quantized weight."""
        return [f"{module_of(name)}.{part}" for part in self.form.part_names]

    def parts(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each stored tensor of a quantized weight, by its whole name.

        Raises QuantizationError, naming the weight, for a shape that cannot be quantized.
        """
        try:
            return {f"{module_of(name)}.{part}": place for part, place in self.form.parts(shape).items()}
        except QuantizationError as error:
            raise self._unstorable(name, error) from error

    def quantize(self, name: str, weight: Tensor, check: Check = check_finite) -> list[NamedTensor]:
        """Return the stored tensors of a quantized weight. Raises QuantizationError that names it."""
        try:
            parts = self.form.quantize(weight.detach().to(self.dtype), check)
        except QuantizationError as error:
            raise self._unstorable(name, error) from error
        return [(f"{module_of(name)}.{part}", tensor) for part, tensor in parts.items()]

    def _unstorable(self, name: str, error: QuantizationError) -> QuantizationError:
        return QuantizationError(f"{name} cannot be stored as {self.form.description}: {error}")

    def dequantize(self, name: str, stored: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """Return a weight from its stored tensors, by their whole names, in `dtype` or the folder's.

        Raises QuantizationError, naming the weight, for tensors that contradict each other.
        """
        start = len(module_of(name)) + 1
        parts = {part[start:]: stored[part] for part in self.part_names(name)}
        try:
            return self.form.dequantize(parts, dtype or self.dtype)
        except QuantizationError as error:
            raise QuantizationError(f"{name}, stored as {self.form.description}: {error}") from error

    def quantized(self, source: WeightSource, *, with_shapes: bool = True) -> WeightSource:
        """Return a source of the engine's tensors, from one of the trainer's, with or without stored shapes of weights.

        A pass raises SyncError for a weight that cannot be quantized, and for quantized weights that `source` lacks.
        inf and nan are found at its end, so that the device is waited for once. Weights of one width wait until there
        are `STACK_BYTES` of them, and are quantized together; the others are not held back.
        """

        def read() -> Iterator[NamedTensor]:
            left, tensors = set(self.names), iter(source.open())
            stacks: dict[tuple[int, torch.device], _Stack] = {}
            largest: list[tuple[_Stack, Tensor]] = []

            for name, tensor in tensors:
                if name not in self.names:
                    yield name, tensor
                    continue
                left.discard(name)
                try:
                    parts_of(self.form, tuple(tensor.shape))
                except QuantizationError as error:
                    deque(tensors, maxlen=0)  # ranks read together: none may stop early
                    problem = self._unstorable(name, error)
                    raise SyncError(f"the weights cannot be sent to the engines: {problem}") from error
                key = tensor.shape[1], tensor.device
                stack = stacks.setdefault(key, _Stack())
                stack.add(name, tensor if tensor.dtype == self.dtype else tensor.detach().to(self.dtype))
                if stack.num_bytes >= STACK_BYTES or not self._goes_on(stack):
                    yield from self._parts_of(stacks.pop(key), largest, with_shapes=with_shapes)
            for stack in stacks.values():
                yield from self._parts_of(stack, largest, with_shapes=with_shapes)
            self._check_finite(largest)
            if left:
                raise SyncError(
                    f"the trainer has no {abbreviate(sorted(left))} ({len(left)} tensors), which --hf-checkpoint "
                    "stores quantized; use a quantized folder of the trained model"
                )

        return WeightSource(read, num_kv_heads=source.num_kv_heads, num_experts=source.num_experts)

    def _goes_on(self, stack: _Stack) -> bool:
        apart = self.form.rows_apart
        return apart is not None and stack.weights[-1].shape[0] % apart == 0

    def _parts_of(self, stack: _Stack, largest: list[tuple[_Stack, Tensor]], *, with_shapes: bool) -> list[NamedTensor]:
        """Return the stored tensors of a stack, weight by weight; its largest magnitudes are checked later."""
        columns = quantize_stacked(self.form, stack.weights, lambda values: largest.append((stack, values)))
        stack.rows = [weight.shape[0] for weight in stack.weights]
        stack.weights = []
        modules = [module_of(name) for name in stack.names]
        named = [
            [(f"{module}.{part}", tensor) for module, tensor in zip(modules, tensors, strict=True)]
            for part, tensors in columns.items()
            if with_shapes or part != WEIGHT_SHAPE
        ]
        return [each for parts in zip(*named, strict=True) for each in parts]

    def _check_finite(self, largest: Sequence[tuple[_Stack, Tensor]]) -> None:
        if not largest or bool(torch.stack([torch.isfinite(values).all() for _, values in largest]).all()):
            return
        for stack, values in largest:
            apart = self.form.rows_apart or len(values)
            shares = values.split([-(-rows // apart) for rows in stack.rows]) if len(stack.names) > 1 else [values]
            for name, share in zip(stack.names, shares, strict=True):
                try:
                    check_finite(share)
                except QuantizationError as error:
                    problem = self._unstorable(name, error)
                    raise SyncError(f"the weights cannot be sent to the engines: {problem}") from error

    def whole_shapes(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a folder's tensors with whole weights instead of their parts."""
        shapes = {name: stored[name] for name in self.whole_names(stored) - self.names}
        for name in self.names:
            start = len(module_of(name)) + 1
            shapes[name] = self.form.whole_shape({part[start:]: stored[part] for part in self.part_names(name)})
        return shapes

    def misfits(self, stored: Mapping[str, tuple[int, ...]]) -> list[str]:
        """List the stored tensors of quantized weights whose shapes contradict the format, with both shapes."""
        whole = self.whole_shapes(stored)
        places = ((part, p[0]) for name in sorted(self.names) for part, p in self.parts(name, whole[name]).items())
        return [f"{part} is {list(stored[part])}, not {list(shape)}" for part, shape in places if stored[part] != shape]

    def whole_names(self, stored: Iterable[str]) -> frozenset[str]:
        """Return the names of a folder's tensors with those of quantized weights instead of their parts."""
        parts = {part for name in self.names for part in self.part_names(name)}
        return frozenset(name for name in stored if name not in parts) | self.names


def weight_of(part: str) -> str | None:
    """Return the weight that a stored tensor with a name such as `x.weight_scale` belongs to; None for another name."""
    module, _, last = part.rpartition(".")
    return f"{module}.{WEIGHT}" if last in PARTS else None


def is_stored_part(name: str, dtype: torch.dtype) -> bool:
    """Whether a tensor is stored for a quantized weight, and so keeps its dtype in any engine."""
    return name.rpartition(".")[2] in PARTS or dtype == torch.float8_e4m3fn


def quantization_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the `quantization_config` of a config.json, or of its text_config; {} without one.

    A ConfigError is raised for one that is not an object.
    """
    text: Any = config.get("text_config")
    nested = cast("Mapping[str, Any]", text) if isinstance(text, Mapping) else cast("Mapping[str, Any]", {})
    settings = config.get("quantization_config") or nested.get("quantization_config") or {}
    if not isinstance(settings, Mapping):
        raise ConfigError(f"quantization_config is {settings!r}, must be an object; correct it in config.json")
    return cast("Mapping[str, Any]", settings)


def read_scheme(config: Mapping[str, Any], stored: Mapping[str, str]) -> QuantizationScheme:
    """Return the scheme of a folder from its config.json and the safetensors dtype of each stored tensor.

    Raises ConfigError for a format that is not supported, with its settings, and for weights without their scales.
    """
    names = {name for name, kind in stored.items() if name.endswith(f".{WEIGHT}") and kind == "F8_E4M3"}
    names |= {weight_of(name) or "" for name in stored if name.endswith(PACKED)}
    if not names:
        raise ConfigError(
            "no weight is stored quantized; remove quantization_config from config.json if they are in bfloat16"
        )
    scales = {
        stored[scale]
        for name in names
        for scale in (f"{module_of(name)}.{part}" for part in ("weight_scale", "weight_scale_inv", "scales"))
        if scale in stored
    }
    shapes = {kind for name, kind in stored.items() if name.endswith(".weight_shape")}
    form = format_of(quantization_settings(config), scale=_one(scales, "scales"), shape=_one(shapes, "weight_shape"))
    others = {
        kind
        for name, kind in stored.items()
        if kind in ("F32", "BF16", "F16") and weight_of(name) is None and name.endswith(f".{WEIGHT}")
    }
    declared = str(config.get("dtype") or config.get("torch_dtype") or "")
    dtype = getattr(torch, declared, None)
    if not isinstance(dtype, torch.dtype):
        dtype = DTYPES[sorted(others)[0]] if len(others) == 1 else torch.bfloat16
    scheme = QuantizationScheme(form, frozenset(names), dtype)
    lacking = sorted(part for name in names for part in scheme.part_names(name) if part not in stored)
    if lacking:
        raise ConfigError(
            f"{len(lacking)} tensors of quantized weights are missing: {abbreviate(lacking)}; convert the folder again"
        )
    return scheme


def _one(kinds: set[str], what: str) -> torch.dtype | None:
    if len(kinds) > 1 or any(kind not in DTYPES for kind in kinds):
        raise ConfigError(f"its {what} have the dtypes {', '.join(sorted(kinds))}; {SUPPORTED}, with one dtype")
    return DTYPES[kinds.pop()] if kinds else None


def format_of(
    settings: Mapping[str, Any], *, scale: torch.dtype | None = None, shape: torch.dtype | None = None
) -> WeightFormat:
    """Return the format that a `quantization_config` describes; `scale`, `shape`: the stored dtypes, if known.

    Raises ConfigError, with the settings, for one that is not supported.
    """
    method = settings.get("quant_method")
    if method == "fp8":
        return _fp8(settings, scale or torch.float32)
    if method == "compressed-tensors":
        return _compressed(settings, scale or torch.bfloat16, shape or torch.int64)
    if method == "awq":
        return _awq(settings, scale or torch.float16)
    if method == "gptq":
        return _gptq(settings, scale or torch.float16)
    raise ConfigError(f"`quant_method` is {method!r}; {SUPPORTED}")


def _awq(settings: Mapping[str, Any], scale: torch.dtype) -> WeightFormat:
    bits = settings.get("bits", settings.get("w_bit"))
    size = settings.get("group_size", settings.get("q_group_size"))
    version, zero_point = str(settings.get("version", "gemm")).lower(), settings.get("zero_point", True)
    if bits != AWQ_BITS or version != "gemm" or zero_point is not True:
        raise ConfigError(
            f"`bits` is {bits!r}, `version` {version!r} and `zero_point` {zero_point!r}; of AWQ, 4 bits in the layout "
            "gemm with zero points are read"
        )
    return AwqGroups(_calibrated_size(size), scale)


def _gptq(settings: Mapping[str, Any], scale: torch.dtype) -> WeightFormat:
    bits, layout = settings.get("bits"), settings.get("checkpoint_format") or "gptq"
    if bits not in (4, 8) or layout not in ("gptq", "gptq_v2") or settings.get("dynamic"):
        raise ConfigError(
            f"`bits` is {bits!r}, `checkpoint_format` {layout!r} and `dynamic` {settings.get('dynamic')!r}; of GPTQ, 4 "
            "or 8 bits, the same for all layers, in the layouts gptq and gptq_v2 are read"
        )
    return GptqGroups(bits, _calibrated_size(settings.get("group_size")), layout == "gptq_v2", scale)


def _calibrated_size(size: Any) -> int:
    if type(size) is not int or (size < 1 and size != -1):
        raise ConfigError(f"`group_size` is {size!r}, must be a positive integer, or -1 for one group per row")
    return size


def _fp8(settings: Mapping[str, Any], scale: torch.dtype) -> WeightFormat:
    kind, block, scale_format = (settings.get(key) for key in ("fmt", "weight_block_size", "scale_fmt"))
    if settings.get("activation_scheme", "dynamic") != "dynamic":
        raise ConfigError(
            f"`activation_scheme` is {settings['activation_scheme']!r}: its scales come from calibration data, which "
            "weight updates do not have; use a folder with dynamic scales, such as those of `furlong convert hf-to-fp8`"
        )
    if kind not in (None, "e4m3", "float8_e4m3fn") or scale_format not in (None, "float", "ue8m0"):
        raise ConfigError(f"`fmt` is {kind!r} and `scale_fmt` {scale_format!r}; {SUPPORTED}")
    if block is None:
        return Fp8Scaled("tensor", scale)
    sizes = cast("list[Any]", block) if isinstance(block, (list, tuple)) else []
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise ConfigError(f"`weight_block_size` is {block!r}, must be two positive integers such as [128, 128]")
    return Fp8Blocks((sizes[0], sizes[1]), scale, is_power_of_two=scale_format == "ue8m0")


def _compressed(settings: Mapping[str, Any], scale: torch.dtype, shape: torch.dtype) -> WeightFormat:
    groups = settings.get("config_groups")
    values = list(cast("Mapping[str, Any]", groups).values()) if isinstance(groups, Mapping) else []
    weights: Any = values[0].get("weights") if len(values) == 1 and isinstance(values[0], Mapping) else None
    if not isinstance(weights, Mapping):
        raise ConfigError(
            f"`config_groups` has {len(values)} groups, or one without `weights`; {SUPPORTED}, in one group"
        )
    args = cast("Mapping[str, Any]", weights)
    kind, bits, strategy, size = (args.get(key) for key in ("type", "num_bits", "strategy", "group_size"))
    seen = f"type {kind!r}, num_bits {bits!r}, strategy {strategy!r}, group_size {size!r}"
    if args.get("actorder"):
        raise ConfigError(
            f"`actorder` is {args['actorder']!r}: its column order comes from calibration data, which weight updates "
            "do not have; convert the bfloat16 model with `furlong convert hf-to-int4`"
        )
    if args.get("symmetric") is False:
        raise ConfigError(f"`symmetric` is false ({seen}); {SUPPORTED}")
    if (kind, bits, strategy) == ("int", 4, "group") and isinstance(size, int) and size > 0:
        return Int4Groups(size, scale, shape, "mse" if args.get("observer") == "mse" else "minmax")
    if (kind, bits) == ("float", 8) and strategy in ("channel", "tensor"):
        return Fp8Scaled(strategy, scale)
    raise ConfigError(f"the weights have {seen}; {SUPPORTED}")
