"""Lets SGLang 0.5.16 run where there is neither CUDA nor its kernels; read at the start of every process of an engine.

Two packages have no build for CPUs that fits: `sgl_kernel`, and `torchvision`, which only models with images use.
SGLang imports names of both at its start and calls none of them on a CPU with PyTorch's own attention. Here every name
of theirs is there, and raises when it is called. And SGLang's /weights_checker waits for a GPU, and hashes otherwise
where there is none: here it waits for nothing, and hashes as it does on CUDA. Its constraint of logits by a grammar
raises on a CPU: here xgrammar does it.

A server forks its schedulers, which SGLang would start as new interpreters: the same code runs in them, without ten
seconds of imports in each.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

ABSENT = ("sgl_kernel", "torchvision")
CHECKER, GRAMMAR = "sglang.srt.utils.weight_checker", "sglang.srt.constrained.xgrammar_backend"


class _AbsentMeta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _absent(f"{cls.__qualname__}.{name}")

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise RuntimeError(f"{cls.__qualname__} is not there on a CPU")


def _absent(name: str) -> type:
    return _AbsentMeta(name, (), {})


class _AbsentLoader(Loader):
    def exec_module(self, module: ModuleType) -> None:
        def named(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return _absent(f"{module.__name__}.{name}")

        module.__version__ = "0"
        module.__getattr__ = named


class _PatchingLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        import torch

        if module.__name__ == GRAMMAR:
            import xgrammar

            def constrain(_: Any, logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
                xgrammar.apply_token_bitmask_inplace(logits, vocab_mask)

            module.XGrammarGrammar.apply_vocab_mask = constrain
            return

        from furlong.transfer.device_checksum import Checksums

        def hashed(tensor: torch.Tensor) -> str:
            sums = Checksums()
            sums.add("", [tensor])
            return sums.digests()[""]

        torch.cuda.synchronize = lambda *_: None
        module._hash_tensor = hashed


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in ABSENT:
            return ModuleSpec(fullname, _AbsentLoader(), is_package=True)
        if fullname not in (CHECKER, GRAMMAR):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader)
        return spec


def _set_start_method(method: str | None, force: bool = False) -> None:
    _original("fork" if method == "spawn" else method, force)


sys.meta_path.insert(0, _Finder())
_original, multiprocessing.set_start_method = multiprocessing.set_start_method, _set_start_method
