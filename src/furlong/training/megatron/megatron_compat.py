"""Make Megatron-core from PyPI run without TransformerEngine or Apex, and on machines without a GPU.

Megatron-core requires a CUDA device: `torch.cuda.current_device()`, `device="cuda"`, CUDA random states, and
`tensor.type() == "torch.cuda.FloatTensor"` in its optimizers. Without a GPU, the name `torch` inside its modules is
replaced by a proxy that uses the CPU. PyTorch itself is patched only in `Tensor.type` and `Tensor.cuda` during four
calls of Megatron-core, and in `torch.compile` while it is imported: its fused kernels are for GPUs, and importing
Inductor takes 2 of 7 seconds. With a GPU nothing of this is done.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
import types
import warnings
from collections.abc import Callable, Generator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from furlong.errors import ConfigError
from furlong.training.megatron.parallel_layout import NOT_INSTALLED

OLDEST, NEWEST = (0, 16), (0, 19)  # tested minor versions

# Imported before the `torch` of Megatron-core's modules is replaced; they import the others that create tensors.
MODULES = ("models.gpt", "models.gpt.moe_module_specs", "optimizer", "pipeline_parallel.schedules")
FACTORIES = (
    "zeros", "ones", "empty", "full", "tensor", "arange", "rand", "randn", "zeros_like", "ones_like", "empty_like",
)  # fmt: skip
CPU = torch.device("cpu")
# Warnings about intended settings or Megatron-core's own code: text, and the module that issues them.
EXPECTED = (
    (r"Transformer Engine and Apex are not installed|Apex is not installed", r"megatron\.core\."),
    (r"full scope is deprecated", r"megatron\.core\.transformer\."),
    (r"The \.grad attribute of a Tensor that is not a leaf", r"megatron\.core\.optimizer\."),
    (r"`torch\.distributed\.\w+_tensor` is deprecated", r"torch\.distributed\."),
)


def prepare() -> None:
    """Import and patch Megatron-core. Call it before building anything; repeated calls do nothing.

    Raises ConfigError if it is not installed or of an untested version.
    """
    _check_version()
    for text, module in EXPECTED:
        warnings.filterwarnings("ignore", message=text, module=module)
    with contextlib.nullcontext() if torch.cuda.is_available() else _uncompiled():
        for name in MODULES:
            _core(name)
    moe_utils = _core("transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):  # its import of TransformerEngine failed and left the name undefined
        moe_utils.te_general_gemm = None
    if not torch.cuda.is_available():
        _on_cpu()


def _core(name: str) -> Any:
    return importlib.import_module(f"megatron.core.{name}")


@contextlib.contextmanager
def _uncompiled() -> Generator[None]:
    """Make `torch.compile` return functions unchanged within the context."""

    def unchanged(function: Callable[..., Any] | None = None, **_: Any) -> Callable[..., Any]:
        return function or unchanged

    compiled, torch.compile = torch.compile, unchanged  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        torch.compile = compiled


def _check_version() -> None:
    try:
        installed = version("megatron-core")
    except PackageNotFoundError as error:
        raise ConfigError(NOT_INSTALLED) from error
    minor = tuple(int(part) for part in installed.split(".")[:2])
    if not OLDEST <= minor <= NEWEST:
        low, high = (".".join(map(str, bound)) for bound in (OLDEST, NEWEST))
        raise ConfigError(
            f"megatron-core {installed} is not tested with furlong; pip install 'megatron-core>={low},<={high}.99'"
        )


def _ours(function: Callable[..., Any]) -> Callable[..., Any]:
    function.__dict__["furlong"] = True
    return function


def _is_ours(function: Any) -> bool:
    return bool(getattr(function, "furlong", False))


class _NullCudaObject:
    """A no-op stream, event or profiler range; any method is a no-op as well."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> _NullCudaObject:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., _NullCudaObject]:
        return lambda *_, **__: _NullCudaObject()


class _Cuda(types.ModuleType):
    """Proxy of `torch.cuda` on a CPU."""

    def __init__(self) -> None:
        super().__init__("torch.cuda")
        no_op: Callable[..., None] = lambda *_, **__: None  # noqa: E731  shorter than three functions
        self.current_device = lambda: CPU
        self.synchronize = self.empty_cache = no_op
        self.manual_seed = torch.manual_seed
        self.get_rng_state = lambda *_, **__: torch.get_rng_state()
        self.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
        self.random = types.SimpleNamespace(get_rng_state=self.get_rng_state)
        self.Stream = self.Event = self.stream = _NullCudaObject
        self.current_stream = self.default_stream = _NullCudaObject
        self.nvtx = types.SimpleNamespace(range_push=no_op, range_pop=no_op, range=_NullCudaObject)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _Torch(types.ModuleType):
    """Proxy of `torch` that creates tensors on the CPU instead of CUDA."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _Cuda()
        for name in FACTORIES:
            setattr(self, name, _cpu_factory(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        setattr(self, name, value)  # cached for the next look-up
        return value


def _cpu_factory(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **options: Any) -> Any:
        device = options.get("device")
        if device is not None and (isinstance(device, int) or torch.device(device).type == "cuda"):
            options["device"] = CPU
        options.pop("pin_memory", None)
        return factory(*args, **options)

    return make


@contextlib.contextmanager
def _cuda_names() -> Generator[None]:
    """Make `Tensor.type()` return "torch.cuda.FloatTensor" and `Tensor.cuda()` the tensor within the context."""
    tensor: Any = torch.Tensor
    if "type" in tensor.__dict__:
        yield
        return
    plain: Callable[..., Any] = torch._C.TensorBase.type  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]  what Tensor inherits

    def cuda_type(self: torch.Tensor, *args: Any, **options: Any) -> Any:
        name = plain(self, *args, **options)
        return name.replace("torch.", "torch.cuda.") if isinstance(name, str) else name

    tensor.type, tensor.cuda = cuda_type, lambda self, *_, **__: self
    try:
        yield
    finally:
        del tensor.type, tensor.cuda


def _with_cuda_names(function: Callable[..., Any]) -> Callable[..., Any]:
    if _is_ours(function):
        return function

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        with _cuda_names():
            return function(*args, **options)

    return _ours(call)


@functools.cache
def _torch() -> _Torch:
    return _Torch()


def _on_cpu() -> None:
    from torch._dynamo import config as dynamo

    dynamo.disable = True  # Megatron-core's fused functions use torch.compile, which needs a C++ compiler
    random = _core("tensor_parallel.random")
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    _drop_warning(random.__name__, "CPU RNG state changed")
    optimizer, distributed = _core("optimizer.optimizer"), _core("optimizer.distrib_optimizer")
    language = _core("models.common.language_module.language_module")
    for owner, name in (
        (optimizer.Float16OptimizerWithFloat16Params, "__init__"),
        (distributed.DistributedOptimizer, "__init__"),
        (distributed.DistributedOptimizer, "sharded_state_dict"),
        (language.LanguageModule, "setup_embeddings_and_output_layer"),
    ):
        setattr(owner, name, _with_cuda_names(owner.__dict__[name]))
    for module in (_core("optimizer.clip_grads"), optimizer, distributed, _core("optimizer")):
        clip = getattr(module, "clip_grad_by_total_norm_fp32", None)
        if clip is not None:
            module.clip_grad_by_total_norm_fp32 = _with_cuda_names(clip)
    for name in ("transformer.moe.moe_utils", "transformer.moe.token_dispatcher"):
        _core(name).maybe_move_tensor_to_cpu = _split_sizes
    for name in ("models.common.embeddings.rope_utils", "models.common.embeddings.rotary_pos_embedding"):
        _core(name).get_pos_emb_on_this_cp_rank = _rotary_of_this_rank
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = _torch()  # pyright: ignore[reportAttributeAccessIssue]  the point of it


def _split_sizes(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:  # noqa: ARG001  its signature
    """Split sizes of an all-to-all as numpy; Megatron-core converts only those that were on a GPU."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _rotary_of_this_rank(embedding: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    """Return the two chunks of positions of a context-parallel rank, without a copy to a GPU."""
    size, rank = group.size(), group.rank()
    chunks = embedding.chunk(2 * size, dim=dim)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim=dim)


def _drop_warning(name: str, words: str) -> None:
    log = logging.getLogger(name)
    if not any(_is_ours(f) for f in log.filters):
        log.addFilter(_ours(lambda record: words not in record.getMessage()))
