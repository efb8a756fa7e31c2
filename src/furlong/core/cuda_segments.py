"""How torch's allocator holds memory of CUDA devices: in segments that grow by pages, or in whole ones.

A whole segment stays as long as one tensor in it does. Optimizer moments that the first step makes where activations
were a moment ago keep all of that from engines on the same GPU; of a segment that grows (`expandable_segments` of
PYTORCH_ALLOC_CONF) every page goes back on its own.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager

import torch

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch reads the first that is there
GROWING, WHOLE = "expandable_segments:True", "expandable_segments:False"


class Segments:
    """The allocator of this process. settings: those in force; torch 2.11 does not tell them."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.settings = next((_close(environment[name]) for name in VARIABLES if name in environment), "")

    def let_grow(self, device: torch.device) -> None:
        """Have memory of a CUDA device taken in segments that grow, from now on.

        What the environment says of segments is kept, and another allocator in it.
        """
        if (
            device.type == "cuda"
            and "expandable_segments" not in self.settings
            and "cudaMallocAsync" not in self.settings
        ):
            self._set(",".join(filter(None, (self.settings, GROWING))))

    @contextmanager
    def whole(self) -> Generator[None]:
        """Take memory inside so that another process can have it by an IPC handle.

        Pages of segments that grow are handed on as file descriptors, which takes the rights of a debugger.
        """
        settings = self.settings
        if GROWING not in settings:
            yield
            return
        self._set(settings.replace(GROWING, WHOLE))
        try:
            yield
        finally:
            self._set(settings)

    def _set(self, settings: str) -> None:
        torch._C._accelerator_setAllocatorSettings(settings)  # pyright: ignore[reportPrivateUsage]
        self.settings = settings


segments = Segments(os.environ)


def whole_in(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of the allocator in `environment`, for a process that takes no segments that grow."""
    return {name: _close(environment[name]).replace(GROWING, WHOLE) for name in VARIABLES if name in environment}


def _close(settings: str) -> str:
    """Settings without spaces, which torch reads over."""
    return settings.replace(" ", "")
