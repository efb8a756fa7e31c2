"""Imports point one way, between packages and between modules, and no package grows past its budget.

Lazy imports inside functions and imports for types count too.
"""

from __future__ import annotations

import ast
import functools
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent / "src" / "furlong"

ERRORS = {"errors", "version"}
CORE = ERRORS | {"core", "catalogue", "quantization", "files"}
INTERFACES = CORE | {"interfaces", "config"}

ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "version": set(),
    "machine": ERRORS,
    "transfer": ERRORS | {"core"},
    "core": ERRORS,
    "catalogue": ERRORS | {"core"},
    "quantization": ERRORS | {"core"},
    "files": ERRORS | {"core", "quantization"},
    "interfaces": CORE,
    "config": CORE,
    "sglang_layout": CORE | {"transfer"},
    "chat": CORE,
    "environments": INTERFACES,
    "sandboxes": CORE,
    "algo": INTERFACES,
    "models": INTERFACES,
    "data": INTERFACES,
    "rewards": INTERFACES,
    "tracking": INTERFACES,
    "weight_sync": INTERFACES | {"transfer", "sglang_layout", "inference"},
    "inference": INTERFACES | {"models", "transfer", "sglang_layout", "chat"},
    "training": INTERFACES | {"models", "algo", "machine"},
    "sessions": INTERFACES | {"chat", "inference"},
    "rollout": INTERFACES | {"algo", "chat", "environments", "sandboxes", "sessions"},
    "tools": INTERFACES | {"data", "rewards", "models", "inference", "training", "tracking", "machine"},
    "diagnosis": INTERFACES
    | {"algo", "data", "rewards", "models", "inference", "training", "weight_sync", "sglang_layout"}
    | {"tracking", "rollout", "machine", "tools"},
    "view": INTERFACES | {"data", "tracking", "tools"},
    "loop": INTERFACES,
    "cluster": INTERFACES | {"training", "inference", "weight_sync", "machine"},
}
ALLOWED["slime_api"] = INTERFACES | {"chat", "inference", "models", "rewards", "rollout", "sessions"}
PARTS = set(ALLOWED)  # the packages above the parts may import all of them
ALLOWED |= {
    "agent": CORE | {"rollout", "sessions"},
    "wiring": PARTS,
    "run": PARTS | {"wiring"},
    "evals": PARTS | {"wiring"},
    "quickstart": PARTS | {"wiring", "run"},
    "reproduce": PARTS | {"evals", "quickstart"},
    "commands": PARTS | {"wiring", "run", "evals", "reproduce"},
    "cli": PARTS | {"commands", "quickstart", "run"},
    "__main__": {"cli"},
    "__init__": PARTS | {"wiring", "run"},
}
# Lines of Python per package, "furlong" for the modules that are in none.
BUDGET = {
    "algo": 1719,
    "catalogue": 1263,
    "chat": 1390,
    "cluster": 1522,
    "commands": 1908,
    "config": 7596,
    "core": 4322,
    "data": 2924,
    "diagnosis": 6387,
    "environments": 1200,
    "evals": 400,
    "files": 1287,
    "furlong": 1327,
    "inference": 10214,
    "loop": 1220,
    "models": 3561,
    "quantization": 1261,
    "quickstart": 350,
    "reproduce": 590,
    "rewards": 1791,
    "rollout": 5023,
    "run": 1626,
    "sandboxes": 1559,
    "sessions": 3274,
    "sglang_layout": 770,
    "slime_api": 1048,
    "tools": 3841,
    "tracking": 1132,
    "training": 9640,
    "transfer": 726,
    "view": 1547,
    "weight_sync": 1987,
    "wiring": 2037,
}
ONLY_IN = {"ray": {"cluster"}, "sglang": {"inference"}, "megatron": {"training", "models"}}  # third party: only there
NEVER = {"pickle", "dill", "cloudpickle", "shelve", "marshal"}  # nothing unpickles data from a network or a file
MAY_PICKLE = {
    ("pickle", "training/megatron_lm/dist_files.py"),  # with a list of classes; its `find_class` imports nothing
    # objects of the program, for processes that the run starts, through their pipe
    ("pickle", "core/user_objects.py"),
    ("cloudpickle", "core/user_objects.py"),
}
WITHOUT_PROCESS_GROUPS = {"core", "algo"}
FORKS = {"fork", "forkpty", "get_context", "set_start_method"}
PROJECT = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text())["project"]
IMPORTED_AS = {"pyyaml": "yaml", "openenv-core": "openenv", "megatron-core": "megatron"}
COMES_WITH_TORCH = {"triton"}  # where torch is built for CUDA


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports_of(path: Path) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: relative import"
            found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return found


def violations(root: Path) -> list[str]:
    found: list[str] = []
    for path in sorted(root.rglob("*.py")):
        home = path.relative_to(root).parts[0].removesuffix(".py")
        if home not in ALLOWED:
            found.append(f"{path.relative_to(root)}: no layer is known for {home}")
            continue
        for name, line in imports_of(path):
            where = f"{path.relative_to(root)}:{line}"
            top, _, rest = name.partition(".")
            target = rest.partition(".")[0]
            if top == "furlong" and target not in ALLOWED[home] | {home}:
                found.append(f"{where}: {home} may not import {name}")
            if top in ONLY_IN and home not in ONLY_IN[top]:
                found.append(f"{where}: only {sorted(ONLY_IN[top])} may import {top}")
            if top in NEVER and (top, path.relative_to(root).as_posix()) not in MAY_PICKLE:
                found.append(f"{where}: {top} is not used in furlong")
            if home in WITHOUT_PROCESS_GROUPS and name.startswith("torch.distributed"):
                found.append(f"{where}: {home} knows no process groups")
    return found


def test_imports_point_only_to_lower_layers():
    assert violations(ROOT) == []


def test_every_package_that_is_imported_is_required_by_name():
    extras = PROJECT["optional-dependencies"]
    required = [*PROJECT["dependencies"], *(line for name in extras if name != "dev" for line in extras[name])]
    names = {Requirement(line).name for line in required}
    known = {IMPORTED_AS.get(name, name.replace("-", "_")) for name in names} | {"furlong"} | COMES_WITH_TORCH
    imported = {name.partition(".")[0]: path.name for path in ROOT.rglob("*.py") for name, _ in imports_of(path)}
    assert {name: file for name, file in imported.items() if name not in known | sys.stdlib_module_names} == {}


def test_nothing_forks():
    for path in ROOT.rglob("*.py"):
        names = {node.attr for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)}
        assert not names & FORKS, path


def modules_of(root: Path) -> dict[str, Path]:
    names = {path: ".".join(("furlong", *path.relative_to(root).with_suffix("").parts)) for path in root.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def circles(root: Path) -> list[set[str]]:
    """The groups of modules that import each other (Tarjan's strongly connected components)."""
    modules = modules_of(root)
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        graph[module] = set()
        for name, _ in imports_of(path):
            while name and name not in modules:
                name = name.rpartition(".")[0]
            if name not in ("", module, "furlong"):  # `furlong/__init__.py` re-exports lazily
                graph[module].add(name)
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path_to: list[str] = []
    found: list[set[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        path_to.append(module)
        for name in graph[module]:
            if name not in order:
                visit(name)
            if name in path_to:
                lowest[module] = min(lowest[module], lowest[name])
        if lowest[module] == order[module]:
            circle = set(path_to[path_to.index(module) :])
            del path_to[path_to.index(module) :]
            found.extend([circle] if len(circle) > 1 else [])

    for module in graph:
        if module not in order:
            visit(module)
    return found


def test_no_modules_import_each_other():
    assert circles(ROOT) == []


def test_a_circle_through_a_lazy_import_is_found(tmp_path):
    for name, other in (("a", "b"), ("b", "c"), ("c", "a")):
        (tmp_path / f"{name}.py").write_text(f"def f():\n    from furlong.{other} import x\n")
    assert circles(tmp_path) == [{"furlong.a", "furlong.b", "furlong.c"}]


def lines_by_package(root: Path) -> dict[str, int]:
    lines: dict[str, int] = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        package = parts[0] if len(parts) > 1 else "furlong"
        lines[package] = lines.get(package, 0) + len(path.read_text().splitlines())
    return lines


def test_no_package_grows_past_its_budget():
    """A package grows past its number only by an edit of the table, with the reason in the commit."""
    lines = lines_by_package(ROOT)
    assert lines.keys() - BUDGET.keys() == set()
    assert {name: (count, BUDGET[name]) for name, count in lines.items() if count > BUDGET[name]} == {}


def test_the_layer_table_has_no_cycle():
    done: set[str] = set()
    while len(done) < len(ALLOWED):
        ready = {name for name, below in ALLOWED.items() if name not in done and below <= done}
        assert ready, f"cycle among {sorted(set(ALLOWED) - done)}"
        done |= ready


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("core/x.py", "from furlong.algo import advantage\n"),
        ("data/x.py", "def f():\n    from furlong.inference.embedded import EmbeddedEngine\n"),
        ("rollout/x.py", "import ray\n"),
        ("wiring/x.py", "from furlong.run.launch import run\n"),
        ("loop/x.py", "import pickle\n"),
        ("algo/x.py", "import torch.distributed as dist\n"),
        ("misc/x.py", "\n"),
    ],
)
def test_a_forbidden_import_is_found(tmp_path, file, text):
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text(text)
    assert len(violations(tmp_path)) == 1
