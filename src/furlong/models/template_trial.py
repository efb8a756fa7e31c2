"""Renders a chat template in a process with limits of time and memory.

A template is a program of whoever wrote the model folder. One that never ends, or builds a text of gigabytes, would
hang or end the process that renders it, so a model's own template is tried once before it is used.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from furlong.errors import ConfigError
from furlong.models.tokenizer import CHAT_TEMPLATE, SHIPPED

TRIAL_S = 8  # processor and wall time; a template takes milliseconds, and the machine may be loaded
TRIAL_BYTES = 512 * 1024**2
TRIAL_CHARS = 10_000_000
_MODULE = "furlong.models.template_worker"
_BOOT = f"import sys, json; sys.path[:] = json.loads(sys.argv[1]); from {_MODULE} import main; main()"
_USER = {"role": "user", "content": "2+2"}
_SYSTEM = {"role": "system", "content": "Count."}
_ANSWER = {"role": "assistant", "content": "4"}
_PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer", "description": "a number"}}, "required": ["a"]}
_TOOL = {"type": "function", "function": {"name": "add", "description": "Add one.", "parameters": _PARAMETERS}}
_TRIALS: tuple[dict[str, Any], ...] = (
    {"messages": [_USER], "tools": None, "add_generation_prompt": True},
    {"messages": [_SYSTEM, _USER], "tools": None, "add_generation_prompt": True},
    {"messages": [_USER, _ANSWER, _USER], "tools": None, "add_generation_prompt": True},
    {"messages": [_USER, _ANSWER], "tools": None, "add_generation_prompt": False},
    {"messages": [_USER], "tools": [_TOOL], "add_generation_prompt": True},
)


def worker_command() -> list[str]:
    """Return the command of a process that renders the tasks of its stdin (`template_worker`)."""
    return [sys.executable, "-c", _BOOT, json.dumps(sys.path)]


def require_bounded_template(tokenizer: Any, name: str) -> None:
    """Render short conversations with a tokenizer's template, in its own process.

    Raises ConfigError if that takes longer or more memory than any template needs. A template that refuses them passes.
    `name` is the folder or file that the message names.
    """
    source = getattr(tokenizer, "chat_template", None)
    sources = list(source.values()) if isinstance(source, dict) else [source]
    for each in sources:
        if isinstance(each, str) and (problem := _problem(each, tuple(sorted(_named_tokens(tokenizer).items())))):
            raise ConfigError(
                f"the chat template of {name} is not usable: {problem} for a conversation of a few words; "
                "correct the loop or text that it builds, or set another one with --chat-template-path"
            )


def _named_tokens(tokenizer: Any) -> dict[str, str]:
    named: dict[str, Any] = getattr(tokenizer, "special_tokens_map", {})
    return {name: str(token) for name, token in named.items() if not isinstance(token, list)}


@functools.cache
def _shipped() -> frozenset[str]:
    return frozenset([CHAT_TEMPLATE, *(template.text() for template in SHIPPED.values())])


@functools.lru_cache(maxsize=32)
def _problem(source: str, named: Sequence[tuple[str, str]]) -> str:
    """Return which limit a template exceeds; "" if none."""
    if source in _shipped():
        return ""
    task = {
        "source": source,
        "values": [{**dict(named), "documents": None, **values} for values in _TRIALS],
        "max_chars": TRIAL_CHARS,
        "memory_bytes": TRIAL_BYTES,
        "cpu_s": TRIAL_S,
    }
    try:
        done = subprocess.run(
            worker_command(), input=json.dumps(task).encode(), capture_output=True, timeout=3 * TRIAL_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it gave no text within {3 * TRIAL_S} s"
    if done.returncode == 0:
        return json.loads(done.stdout).get("limit", "")
    if done.returncode < 0:  # ended by a signal, such as that of the limit
        return f"it ran longer than {TRIAL_S} s or needed more than {TRIAL_BYTES} bytes (signal {-done.returncode})"
    raise ConfigError(
        f"the process that tries chat templates ended with code {done.returncode}: "
        f"{done.stderr.decode('utf-8', 'replace')[-500:]!r}; report this, with the template"
    )
