"""Import of the modules of user functions: `package.module` by name, or a Python file."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

from furlong.core import slime_modules
from furlong.core.text import nearest_path
from furlong.core.user_code import describe_exception, message_of, place_of
from furlong.core.user_objects import USER_OBJECTS, find_object, object_name
from furlong.errors import ConfigError, EndedBySignal


def split_path(path: str) -> tuple[str, tuple[str, ...]]:
    """Split `package.module.attr`, `package.module:a.b` or `file.py:attr` into module or file, and attributes.

    Raises ConfigError if the path does not name a function.
    """
    if "::" in path:
        raise ConfigError(f"{path!r} has two colons; write {path.replace('::', ':')}")
    module_name, colon, attribute = path.rpartition(":") if ":" in path else path.rpartition(".")
    if not module_name or not attribute or path.endswith(".py"):
        forms = "package.module.function or file.py:function"
        if path.endswith(".py") and Path(path).is_file():
            names = re.findall(r"^(?:async )?(?:def|class) ([A-Za-z]\w*)", Path(path).read_text("utf-8"), re.M)
            forms = " or ".join(f"{path}:{name}" for name in names[:3]) or forms
        raise ConfigError(f"{path!r} does not name a function; write {forms}")
    return module_name, tuple(attribute.split(".")) if colon else (attribute,)


def imported_name(module_name: str) -> str:
    """Return the name in `sys.modules` of a module, or of a file.

    A file has its own name if that finds it on `sys.path`, so that processes which user code starts with
    `multiprocessing` can import it; otherwise, as another module has its name, one derived from its path.
    """
    if not module_name.endswith(".py"):
        return module_name
    file = Path(module_name).expanduser().resolve()
    try:
        spec = importlib.util.find_spec(file.stem) if file.stem.isidentifier() else None
    except (ImportError, ValueError):  # a module without a spec, such as __main__
        spec = None
    if spec is not None and spec.origin is not None and Path(spec.origin).resolve() == file:
        return file.stem
    return f"furlong_hook_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"


def import_module_of(path: str) -> ModuleType:
    """Import the module or file of a function's path, which may import `slime.*` (`core.slime_modules`).

    Raises ConfigError if the module does not exist, raises or exits.
    """
    slime_modules.install()
    module_name, _ = split_path(path)
    if object_name(path) is not None:
        find_object(path)
        return USER_OBJECTS
    return _module_of_file(path, module_name) if module_name.endswith(".py") else _module(path, module_name)


def _module(path: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if isinstance(error, slime_modules.NotInFurlongError):
            raise ConfigError(f"{path}: {error}") from error
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"{path}: importing {name} needs the module {error.name}, which is not installed; install it"
            ) from error
        raise ConfigError(f"{path}: no module {error.name}; {_module_fix(path, name)}") from error
    except (KeyboardInterrupt, EndedBySignal):
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {message_of(error)}{place_of(error)}"
        raise ConfigError(f"{path}: importing {name} raised {what}; fix the module") from error
    except BaseException as error:  # sys.exit
        raise ConfigError(f"{path}: importing {name} raised {describe_exception(error)}; fix the module") from error


def _module_fix(path: str, name: str) -> str:
    """Return how to name a module that is not on the path; its file may be in this directory, as slime allows."""
    file = Path(*name.split(".")).with_suffix(".py")
    if file.is_file():
        return f"write {file}:{path[len(name) + 1 :]}"
    return "put its folder on PYTHONPATH, or write file.py:function"


def _module_of_file(path: str, file_name: str) -> ModuleType:
    """Import a file; its directory is added to sys.path for imports next to it."""
    file = Path(file_name).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"{path}: no file {file}; {nearest_path(file)}")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
        importlib.invalidate_caches()
    name = imported_name(file_name)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: {file} cannot be imported; give a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt | EndedBySignal):
            raise
        if isinstance(error, slime_modules.NotInFurlongError):
            raise ConfigError(f"{path}: {file}: {error}") from error
        what = (
            f"{type(error).__name__}: {message_of(error)}{place_of(error)}"
            if isinstance(error, Exception)
            else describe_exception(error)
        )
        raise ConfigError(f"{path}: running {file} raised {what}; fix the file") from error
    return module


def assignment_of(module: ModuleType, name: str) -> str:
    """Return ` (file:line)` of the last assignment to `name` at the top of a module; "" if there is none."""
    file = Path(module.__file__ or "")
    statements = ast.parse(file.read_bytes()).body if file.suffix == ".py" and file.is_file() else []
    lines = [
        statement.lineno
        for statement in statements
        if isinstance(statement, ast.Assign | ast.AnnAssign | ast.ImportFrom)
        for node in ast.walk(statement)
        if (isinstance(node, ast.Name) and node.id == name) or (isinstance(node, ast.alias) and node.name == name)
    ]
    return f" ({file}:{lines[-1]})" if lines else ""
