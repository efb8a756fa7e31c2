"""Sandboxes: run code of a policy within limits, apart from this machine's files, network and secrets."""

from furlong.sandboxes.code_sandbox import CodeSandbox, Executed, SandboxLimits, sandbox
from furlong.sandboxes.sandbox_pool import SandboxPool

__all__ = ["CodeSandbox", "Executed", "SandboxLimits", "SandboxPool", "sandbox"]
