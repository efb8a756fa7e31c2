"""The installation: package versions, and compiled packages that do not load (ENV01). Imports no heavy library."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from furlong.catalogue import Diagnosis, diagnosis
from furlong.core.process_environment import installed_version
from furlong.version import __version__

# Tested versions: the ranges of pyproject.toml.
TESTED: Mapping[str, str] = {
    "torch": ">=2.11,<2.14",
    "transformers": ">=5.12,<6",
    "safetensors": ">=0.5",
    "ray": ">=2.52",
    "sglang": "==0.5.16",
    "sglang-router": ">=0.3.2",
    "megatron-core": ">=0.16.1,<0.20",
}
NEEDED = ("torch", "transformers", "safetensors")
# Packages with compiled code, and the module whose import loads their libraries.
KERNELS: Mapping[str, str] = {
    "flash-attn": "flash_attn_2_cuda",
    "flash-attn-3": "flash_attn_3._C",
    "sgl-kernel": "sgl_kernel",
    "flashinfer-python": "flashinfer",
    "transformer-engine": "transformer_engine.pytorch",
    "triton": "triton",
}
PROBE_S = 120.0
DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Package:
    """A package. `installed`: its version, or None. `problem`: why its compiled code does not load."""

    name: str
    installed: str | None
    tested: str = ""
    is_tested: bool = True
    problem: str = ""


@dataclass(frozen=True)
class Installation:
    """The packages installed on this machine."""

    furlong: str
    python: str
    machine: str
    driver: str | None
    packages: Sequence[Package]

    def record(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self)


def read_environment(kernels: Mapping[str, str] = KERNELS) -> Installation:
    """Read versions, and import each installed compiled package in its own process, which it may crash."""
    packages: list[Package] = []
    for name, tested in TESTED.items():
        installed = installed_version(name)
        is_tested = installed is None or SpecifierSet(tested).contains(installed, prereleases=True)
        packages.append(Package(name, installed, tested, is_tested))
    for name, module in kernels.items():
        if (installed := installed_version(name)) is not None:
            packages.append(Package(name, installed, problem=_probe(module)))
    driver = DRIVER.read_text().splitlines()[0] if DRIVER.is_file() else None
    machine = f"{platform.system()} {platform.machine()}"
    return Installation(__version__, platform.python_version(), machine, driver, packages)


def environment_findings(environment: Installation) -> list[Diagnosis]:
    """ENV01: untested versions, missing required packages, and compiled packages that do not load."""
    found: list[Diagnosis] = []
    if untested := [p for p in environment.packages if p.installed is not None and not p.is_tested]:
        shown = ", ".join(f"{p.name} {p.installed} (tested {p.tested})" for p in untested)
        remedy = f"run `pip install {' '.join(repr(p.name + p.tested) for p in untested)}`"
        evidence = {"installed": {p.name: p.installed for p in untested}}
        found.append(diagnosis("ENV01", f"untested versions: {shown}", remedy=remedy, evidence=evidence))
    if missing := [p for p in environment.packages if p.installed is None and p.name in NEEDED]:
        found.append(
            diagnosis(
                "ENV01",
                f"not installed: {', '.join(p.name for p in missing)}",
                cause="furlong was installed without its dependencies.",
                remedy=f"run `pip install {' '.join(repr(p.name + p.tested) for p in missing)}`",
                evidence={"missing": [p.name for p in missing]},
            )
        )
    torch = next((p.installed for p in environment.packages if p.name == "torch"), None)
    for package in environment.packages:
        if package.problem:
            found.append(
                diagnosis(
                    "ENV01",
                    f"{package.name} {package.installed} does not load: {package.problem}",
                    cause=f"It was compiled for another version of PyTorch or CUDA (torch {torch} is installed).",
                    remedy=f"run `pip install --force-reinstall --no-deps --no-build-isolation {package.name}`",
                    evidence={"package": package.name, "problem": package.problem},
                )
            )
    return found


def _probe(module: str) -> str:
    words = [sys.executable, "-c", f"import torch, {module}"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=PROBE_S, check=False)
    except subprocess.TimeoutExpired:
        return f"importing {module} takes longer than {PROBE_S:g} s"
    if done.returncode == 0:
        return ""
    return (done.stderr.strip().splitlines() or [f"importing {module} exited with code {done.returncode}"])[-1]
