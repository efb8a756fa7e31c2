"""The installation: package versions, and compiled packages that do not load (ENV01). Imports no heavy library."""

from __future__ import annotations

import importlib.util
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
    "ray": ">=2.50",
    "sglang": "==0.5.16",
    "sglang-router": ">=0.3",
    "megatron-core": ">=0.16.1,<0.20",
}
NEEDED = ("torch", "transformers", "safetensors")
PROBE_S = 120.0
DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class CompiledPackage:
    """A package with compiled code: its name on PyPI, and the module whose import loads its libraries."""

    package: str
    module: str
    install: str


KERNELS = (
    CompiledPackage("flash-attn", "flash_attn_2_cuda", "--no-build-isolation flash-attn"),
    CompiledPackage("flash-attn-3", "flash_attn_3._C", "--no-build-isolation flash-attn-3"),
    CompiledPackage("sgl-kernel", "sgl_kernel", "sgl-kernel"),
    CompiledPackage("flashinfer-python", "flashinfer", "flashinfer-python"),
    CompiledPackage(
        "transformer-engine", "transformer_engine.pytorch", "--no-build-isolation transformer-engine[pytorch]"
    ),
    CompiledPackage("triton", "triton", "triton"),
)


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


def read_environment(kernels: Sequence[CompiledPackage] = KERNELS) -> Installation:
    """Read versions, and load each installed compiled package in its own process, which it may crash."""
    packages = [_package(name, tested) for name, tested in TESTED.items()]
    packages += [
        Package(kernel.package, installed, problem=_probe(kernel))
        for kernel in kernels
        if (installed := installed_version(kernel.package)) is not None
    ]
    return Installation(
        furlong=__version__,
        python=platform.python_version(),
        machine=f"{platform.system()} {platform.machine()}",
        driver=DRIVER.read_text().splitlines()[0] if DRIVER.is_file() else None,
        packages=packages,
    )


def environment_findings(environment: Installation, kernels: Sequence[CompiledPackage] = KERNELS) -> list[Diagnosis]:
    """ENV01: untested versions, missing required packages, and compiled packages that do not load."""
    diagnoses: list[Diagnosis] = []
    untested = [p for p in environment.packages if p.installed is not None and not p.is_tested]
    if untested:
        shown = ", ".join(f"{p.name} {p.installed} (tested {p.tested})" for p in untested)
        requirements = " ".join(f"'{p.name}{p.tested}'" for p in untested)
        diagnoses.append(
            diagnosis(
                "ENV01",
                f"untested versions: {shown}",
                remedy=f"run `pip install {requirements}`",
                evidence={"installed": {p.name: p.installed for p in untested}},
            )
        )
    if missing := [p for p in environment.packages if p.installed is None and p.name in NEEDED]:
        diagnoses.append(
            diagnosis(
                "ENV01",
                f"not installed: {', '.join(p.name for p in missing)}",
                cause="furlong was installed without its dependencies.",
                remedy=f"run `pip install {' '.join(repr(p.name + p.tested) for p in missing)}`",
                evidence={"missing": [p.name for p in missing]},
            )
        )
    install = {kernel.package: kernel.install for kernel in kernels}
    for package in environment.packages:
        if package.problem:
            torch = next((p.installed for p in environment.packages if p.name == "torch"), None)
            diagnoses.append(
                diagnosis(
                    "ENV01",
                    f"{package.name} {package.installed} does not load: {package.problem}",
                    cause=f"It was compiled for another version of PyTorch or CUDA (torch {torch} is installed).",
                    remedy=f"run `pip install --force-reinstall --no-deps {install[package.name]}`",
                    evidence={"package": package.name, "problem": package.problem},
                )
            )
    return diagnoses


def _package(name: str, tested: str) -> Package:
    installed = installed_version(name)
    is_tested = installed is None or SpecifierSet(tested).contains(installed, prereleases=True)
    return Package(name, installed, tested, is_tested)


def _probe(kernel: CompiledPackage) -> str:
    """Return why the module cannot be imported; "" if it can."""
    try:
        if importlib.util.find_spec(kernel.module.partition(".")[0]) is None:
            return f"the package is installed, but has no module {kernel.module}"
        done = subprocess.run(
            [sys.executable, "-c", f"import torch, {kernel.module}"],
            capture_output=True,
            text=True,
            timeout=PROBE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"importing {kernel.module} takes longer than {PROBE_S:g} s"
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"importing {kernel.module} exited with code {done.returncode}"
