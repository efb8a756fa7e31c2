"""Options of SGLang and sglang-router as flags: `--sglang-NAME` and `--router-NAME` are their `--NAME`.

They are checked against the lists in `engine_options.json` (scripts/make_engine_options.py) and live in one field each,
`sglang_options` and `router_options`: {"attention_backend": "fa3"}. Where another version of SGLang is installed,
choices, and a name that the list lacks, are handed on unchecked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from furlong.core.process_environment import installed_version
from furlong.core.text import did_you_mean

LISTS = Path(__file__).parent / "engine_options.json"
PACKAGES = {"sglang": "sglang", "router": "sglang-router"}
FIELDS = {"sglang": "sglang_options", "router": "router_options"}

# What furlong sets itself, and the flag that decides it.
OWN: dict[str, dict[str, str]] = {
    "sglang": {
        "model-path": "--hf-checkpoint",
        "tp-size": "--rollout-num-gpus-per-engine",
        "random-seed": "--seed",
        "enable-memory-saver": "--colocate",
        "enable-return-routed-experts": "--use-rollout-routing-replay or --log-routing-agreement",
        "host": "",
        "port": "",
        "nccl-port": "",
        "nnodes": "",
        "node-rank": "",
        "dist-init-addr": "",
        "base-gpu-id": "",
        "gpu-id-step": "",
        "weight-version": "",
        "trust-remote-code": "",
        "skip-server-warmup": "",
        "config": "",
        "disaggregation-mode": "worker_type in --sglang-config, or --prefill-num-servers",
        "disaggregation-bootstrap-port": "",
    },
    "router": {
        "policy": "--sglang-router-strategy",
        "request-timeout-secs": "--sglang-router-request-timeout-secs",
        "api-key": "--sglang-api-key",
        "host": "",
        "port": "",
        "worker-urls": "",
        "prometheus-port": "",
        "prometheus-host": "",
        "pd-disaggregation": "worker_type in --sglang-config, or --prefill-num-servers",
        "prefill": "",
        "decode": "",
    },
}

# What would keep a run from its own servers, or do nothing in it, by how options begin.
_HTTP = "furlong speaks HTTP to its servers, which belong into a network of your own"
_ORDERS = "furlong gives its servers orders with one key, --sglang-api-key"
_WORKERS = "the workers of a run are its engines, which have its weights"
_RESPONSES = "it is for /v1/responses, which a run does not ask for"
REFUSED: dict[str, dict[str, str]] = {
    "sglang": {
        "admin-api-key": _ORDERS,
        "ssl-": _HTTP,
        "enable-ssl-": _HTTP,
        "grpc-": _HTTP,
        "smg-": _HTTP,
        "is-embedding": "such a server generates nothing",
        "encoder-only": "such a server generates nothing",
        "checkpoint-engine-wait-weights": "weights are sent once a server answers",
    },
    "router": {
        "control-plane-": _ORDERS,
        "jwt-": _ORDERS,
        "tls-": _HTTP,
        "mini-lb": "it has no /workers, which furlong asks",
        "service-discovery": _WORKERS,
        "selector": _WORKERS,
        "prefill-selector": _WORKERS,
        "decode-selector": _WORKERS,
        "history-backend": _RESPONSES,
        "oracle-": _RESPONSES,
        "postgres-": _RESPONSES,
        "redis-": _RESPONSES,
        "mcp-": _RESPONSES,
    },
}


@dataclass(frozen=True)
class EngineOption:
    """One option. `kind` is switch, int, float, str, list, or text for what the program parses itself.

    A toggle is a switch that may be on by default; the option `no-NAME`, a switch, is for the other value.
    """

    name: str
    kind: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class OptionList:
    """The options of one program by name, with their other names."""

    version: str
    options: Mapping[str, EngineOption]

    @staticmethod
    @cache
    def of(program: str) -> OptionList:
        """The shipped list of "sglang" or "router"."""
        listed = json.loads(LISTS.read_text())[program]
        options: dict[str, EngineOption] = {}
        for name, facts in listed["options"].items():
            option = EngineOption(name, facts["kind"], tuple(map(str, facts.get("choices", ()))))
            for spelling in (name, *facts.get("aliases", ())):
                options[spelling] = option
            if option.kind == "toggle":
                options[f"no-{name}"] = EngineOption(f"no-{name}", "switch")
        return OptionList(listed["version"], options)


def program_of(flag: str) -> str | None:
    """The program whose option a flag is by its prefix."""
    return next((program for program in FIELDS if flag.startswith(f"--{program}-")), None)


def find(flag: str) -> EngineOption:
    """The option of a flag with one of the prefixes. Raises ValueError for one that is not known or not taken."""
    program = program_of(flag)
    assert program is not None
    listed = OptionList.of(program)
    name = flag.removeprefix(f"--{program}-")
    option = listed.options.get(name)
    own = OWN[program].get(option.name if option else name)
    if own is not None:
        raise ValueError(f"is set by furlong; {f'use {own}' if own else 'leave it out'}")
    for start, reason in REFUSED[program].items():
        if (option.name if option else name).startswith(start):
            raise ValueError(f"is not taken: {reason}; leave it out")
    is_other_version = installed_version(PACKAGES[program]) not in (None, listed.version)
    if option is not None:
        return replace(option, choices=()) if is_other_version else option
    if is_other_version:
        return EngineOption(name, "text")
    known = [f"--{program}-{spelling}" for spelling in listed.options]
    _, hint = did_you_mean(flag, known)
    raise ValueError(f"is no option of {PACKAGES[program]} {listed.version}; {hint or 'see its --help'}")


def add_option(values: dict[str, Any], flag: str, value: Callable[[EngineOption], Any]) -> None:
    """Put an option, with what `value` makes of it, into its program's field of `values`. Raises ValueError."""
    option = find(flag)
    field = FIELDS[str(program_of(flag))]
    values[field] = {**values.get(field, {}), option.name.replace("-", "_"): value(option)}


def value_of(option: EngineOption, words: Sequence[str]) -> Any:
    """Convert the words given to an option. Raises ValueError saying what was given and what is wanted."""
    if option.kind in ("switch", "toggle"):
        if words:
            raise ValueError(f"takes no value, got {words[0]!r}")
        return True
    if not words:
        if option.kind == "text":
            return True
        raise ValueError(f"got nothing, wanted {_wanted(option)}")
    if option.kind == "list":
        return list(words)
    if len(words) > 1:
        return list(words) if option.kind == "text" else _refuse(option, " ".join(words))
    return _scalar(option, words[0])


def value_in_file(option: EngineOption, value: Any) -> Any:
    """Check a value of a YAML file. Raises ValueError as `value_of` does."""
    if option.kind == "switch":
        return value if isinstance(value, bool) else _refuse(option, value)
    if option.kind == "toggle":
        return value if value is True else _refuse(option, value)
    if option.kind in ("list", "text"):
        return value
    if isinstance(value, bool | list | dict) or value is None:
        return _refuse(option, value)
    return _scalar(option, str(value))


def _scalar(option: EngineOption, word: str) -> Any:
    if option.kind in ("int", "float"):
        try:
            return int(word) if option.kind == "int" else float(word)
        except ValueError:
            return _refuse(option, word)
    if option.choices and word not in option.choices:
        return _refuse(option, word)
    return word


def _refuse(option: EngineOption, value: Any) -> Any:
    raise ValueError(f"got {value!r}, wanted {_wanted(option)}")


def _wanted(option: EngineOption) -> str:
    if option.choices:
        return f"one of {', '.join(option.choices)}"
    names = {
        "switch": "true or false",
        "toggle": f"true; no-{option.name} is for the other value",
        "int": "an integer",
        "float": "a number",
    }
    return names.get(option.kind, "a value")
