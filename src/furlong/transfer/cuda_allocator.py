"""Settings of PyTorch's CUDA caching allocator: expandable or fixed segments.

A fixed segment stays allocated while any tensor in it is alive. Optimizer states that the first step allocates among
freed activations then keep that memory from engines on the same GPU. An expandable segment (`expandable_segments` of
PYTORCH_ALLOC_CONF) releases each free page.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager

import torch

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch reads the first one that is set
EXPANDABLE, FIXED = "expandable_segments:True", "expandable_segments:False"


class CudaAllocator:
    """The allocator of this process. `settings` are those in effect; torch 2.11 cannot report them."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.settings = next((_without_spaces(environment[name]) for name in VARIABLES if name in environment), "")

    def expand_segments(self, device: torch.device) -> None:
        """Use expandable segments from now on, if `device` is a CUDA device.

        A setting of `expandable_segments` or of the cudaMallocAsync backend in the environment takes precedence.
        """
        if (
            device.type == "cuda"
            and "expandable_segments" not in self.settings
            and "cudaMallocAsync" not in self.settings
        ):
            self._set(",".join(filter(None, (self.settings, EXPANDABLE))))

    @contextmanager
    def fixed_segments(self) -> Generator[None]:
        """Allocate fixed segments inside, so that other processes can map them through CUDA IPC handles.

        Pages of expandable segments are shared as file descriptors, which needs the ptrace permission.
        """
        settings = self.settings
        if EXPANDABLE not in settings:
            yield
            return
        self._set(settings.replace(EXPANDABLE, FIXED))
        try:
            yield
        finally:
            self._set(settings)

    def _set(self, settings: str) -> None:
        torch._C._accelerator_setAllocatorSettings(settings)  # pyright: ignore[reportPrivateUsage]
        self.settings = settings


cuda_allocator = CudaAllocator(os.environ)


def without_expandable_segments(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the allocator variables of `environment` for a child process that must not use expandable segments."""
    return {
        name: _without_spaces(environment[name]).replace(EXPANDABLE, FIXED) for name in VARIABLES if name in environment
    }


def _without_spaces(settings: str) -> str:
    return settings.replace(" ", "")
