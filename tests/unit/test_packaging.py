"""What an installed furlong consists of: every file beside the code, and every package that the code imports."""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "furlong"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
IMPORTED_AS = {"pyyaml": "yaml", "math-verify": "math_verify", "megatron-core": "megatron"}
COME_WITH = {"triton": "torch, where it is built for CUDA"}


def test_every_file_beside_the_code_is_package_data() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["furlong"]
    packed = {path for pattern in patterns for path in SOURCES.glob(pattern)}
    beside = {p for p in SOURCES.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")}
    assert beside
    assert beside == packed


def test_every_package_that_is_imported_is_required_by_name() -> None:
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(line for name in extras if name != "dev" for line in extras[name])]
    names = {Requirement(line).name for line in wanted}
    known = {IMPORTED_AS.get(name, name.replace("-", "_")) for name in names} | {"furlong", *COME_WITH}
    found: dict[str, str] = {}
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            found |= {module.partition(".")[0]: str(path.relative_to(ROOT)) for module in modules}
    unknown = {
        name: where for name, where in found.items() if name not in known and name not in sys.stdlib_module_names
    }
    assert unknown == {}
