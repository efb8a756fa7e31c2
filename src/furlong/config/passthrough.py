"""Options of SGLang and sglang-router as flags: `--sglang-NAME` and `--router-NAME` are their `--NAME`.

They are checked against `engine_options.json` (scripts/make_engine_options.py) and stored in one field each,
`sglang_options` and `router_options`: {"attention_backend": "fa3"}. If another version of SGLang is installed, choices
and unknown names are passed on unchecked.
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

# Options that furlong sets itself: the flag that determines them, and those without such a flag.
_GROUPS_FLAG = "worker_type in --sglang-config, or --prefill-num-servers"
SET_BY_FLAG = {
    "sglang": {
        "model-path": "--hf-checkpoint",
        "tp-size": "--rollout-num-gpus-per-engine",
        "random-seed": "--seed",
        "enable-memory-saver": "--colocate",
        "enable-return-routed-experts": "--use-rollout-routing-replay or --log-routing-agreement",
        "disaggregation-mode": _GROUPS_FLAG,
    },
    "router": {
        "policy": "--sglang-router-strategy",
        "request-timeout-secs": "--sglang-router-request-timeout-secs",
        "api-key": "--sglang-api-key",
        "pd-disaggregation": _GROUPS_FLAG,
    },
}
ALWAYS_SET = {
    "sglang": "host port nccl-port nnodes node-rank dist-init-addr base-gpu-id gpu-id-step weight-version "
    "trust-remote-code skip-server-warmup config disaggregation-bootstrap-port",
    "router": "host port worker-urls prometheus-port prometheus-host prefill decode",
}

# Options that would cut a run off from its servers or have no effect: prefixes by reason.
_HTTP = "furlong talks plain HTTP to its servers, which belong in a private network"
_ORDERS = "furlong controls its servers with one key, --sglang-api-key"
REFUSED = {
    "sglang": {
        _ORDERS: "admin-api-key",
        _HTTP: "ssl- enable-ssl- grpc- smg-",
        "such a server does not generate": "is-embedding encoder-only",
        "weights are sent when a server is ready": "checkpoint-engine-wait-weights",
    },
    "router": {
        _ORDERS: "control-plane- jwt-",
        _HTTP: "tls-",
        "it has no /workers endpoint, which furlong uses": "mini-lb",
        "the workers of a run are its own engines": "service-discovery selector prefill-selector decode-selector",
        "it is for /v1/responses, which a run does not use": "history-backend oracle- postgres- redis- mcp-",
    },
}


@dataclass(frozen=True)
class EngineOption:
    """One option. `kind` is switch, toggle, int, float, str, list, or text for values that the program parses itself.

    A toggle is a switch that may be on by default; the switch `no-NAME` turns it off.
    """

    name: str
    kind: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class OptionList:
    """The options of one program by name and alias."""

    version: str
    options: Mapping[str, EngineOption]

    @staticmethod
    @cache
    def of(program: str) -> OptionList:
        """Return the shipped list of "sglang" or "router"."""
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
    """Return the program to which a flag belongs by its prefix."""
    return next((program for program in FIELDS if flag.startswith(f"--{program}-")), None)


def find(flag: str) -> EngineOption:
    """Return the option of a prefixed flag. Raises ValueError if it is unknown or not accepted."""
    program = program_of(flag)
    assert program is not None
    listed = OptionList.of(program)
    name = flag.removeprefix(f"--{program}-")
    option = listed.options.get(name)
    full_name = option.name if option else name
    setting = SET_BY_FLAG[program].get(full_name)
    if setting is not None or full_name in ALWAYS_SET[program].split():
        raise ValueError(f"is set by furlong; {f'use {setting}' if setting else 'remove it'}")
    for reason, prefixes in REFUSED[program].items():
        if full_name.startswith(tuple(prefixes.split())):
            raise ValueError(f"is not accepted: {reason}; remove it")
    is_other_version = installed_version(PACKAGES[program]) not in (None, listed.version)
    if option is not None:
        return replace(option, choices=()) if is_other_version else option
    if is_other_version:
        return EngineOption(name, "text")
    known = [f"--{program}-{spelling}" for spelling in listed.options]
    _, hint = did_you_mean(flag, known)
    raise ValueError(f"is not an option of {PACKAGES[program]} {listed.version}; {hint or 'see its --help'}")


def add_option(values: dict[str, Any], flag: str, value: Callable[[EngineOption], Any]) -> None:
    """Add an option, converted by `value`, to its program's field of `values`. Raises ValueError."""
    option = find(flag)
    field = FIELDS[str(program_of(flag))]
    values[field] = {**values.get(field, {}), option.name.replace("-", "_"): value(option)}


def value_of(option: EngineOption, words: Sequence[str]) -> Any:
    """Convert the words of an option. Raises ValueError with the given and the expected value."""
    if option.kind in ("switch", "toggle"):
        if words:
            raise ValueError(f"takes no value, got {words[0]!r}")
        return True
    if not words:
        if option.kind == "text":
            return True
        raise ValueError(f"has no value, expected {_expected(option)}")
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
    raise ValueError(f"got {value!r}, expected {_expected(option)}")


def _expected(option: EngineOption) -> str:
    if option.choices:
        return f"one of {', '.join(option.choices)}"
    names = {
        "switch": "true or false",
        "toggle": f"true; use no-{option.name} to turn it off",
        "int": "an integer",
        "float": "a number",
    }
    return names.get(option.kind, "a value")
