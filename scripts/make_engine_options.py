"""Print the SGLang and sglang-router options shipped with furlong, read from their argument parsers.

usage: python scripts/make_engine_options.py > src/furlong/config/engine_options.json

Both packages must be installed. The script needs a GPU; to run it on a CPU, first run `make sglang-cpu`, then set:

    SGLANG_USE_CPU_ENGINE=1 PYTHONPATH=tests/real_sglang/standins:.sglang-cpu:src
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from typing import Any

from sglang.srt.server_args import ServerArgs
from sglang_router.router_args import RouterArgs

Entry = dict[str, Any]


def entry_of(action: argparse.Action) -> tuple[str, Entry]:
    """Return the name of an option and its entry: value kind, choices and aliases."""
    name, *aliases = (word.removeprefix("--") for word in action.option_strings if word.startswith("--"))
    if isinstance(action, argparse.BooleanOptionalAction):
        return name, {"kind": "toggle"}  # --no-NAME sets the opposite value
    kind = "text"
    if action.nargs == 0:
        kind = "switch"
    elif action.nargs not in (None, "?"):
        kind = "list"
    elif action.type in (int, float):
        kind = action.type.__name__
    elif action.type in (str, None) and action.nargs is None:
        kind = "str"
    entry: Entry = {"kind": kind}
    if action.choices:
        entry["choices"] = sorted(map(str, action.choices))
    if aliases:
        entry["aliases"] = aliases
    return name, entry


def listed(package: str, add: Any) -> Entry:
    """Return the version of `package` and the options that `add` adds to a parser."""
    parser = argparse.ArgumentParser(add_help=False)
    add(parser)
    return {"version": version(package), "options": dict(sorted(map(entry_of, parser._actions)))}


def main() -> None:
    """Print the JSON file with one option per line."""
    lists = {
        "sglang": listed("sglang", ServerArgs.add_cli_args),
        "router": listed("sglang-router", RouterArgs.add_cli_args),
    }
    parts: list[str] = []
    for name, found in lists.items():
        rows = ",\n".join(f"  {json.dumps(option)}: {json.dumps(entry)}" for option, entry in found["options"].items())
        parts.append(f'{json.dumps(name)}: {{"version": {json.dumps(found["version"])}, "options": {{\n{rows}\n}}}}')
    sys.stdout.write("{\n" + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    main()
