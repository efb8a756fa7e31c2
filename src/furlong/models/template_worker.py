"""The process that renders a chat template: reads a task from stdin and writes {"text"}, {"error"} or {"limit"}.

It limits its own memory and processor time, and imports neither torch nor transformers. A task has the values of one
rendering, or a list of them of which the last text is returned. "limit" is the limit that was exceeded.
"""

from __future__ import annotations

import functools
import json
import resource
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


def main() -> None:
    """Render one template."""
    task: dict[str, Any] = json.load(sys.stdin)
    statm = Path("/proc/self/statm")  # of Linux
    in_use = int(statm.read_text().split()[0]) * resource.getpagesize() if statm.exists() else 0
    limit = in_use + int(task["memory_bytes"])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (task["cpu_s"], task["cpu_s"]))
    values = task["values"]
    reply: dict[str, str] = {}
    for each in values if isinstance(values, list) else [values]:
        reply = _rendered(render_template, task, each)
        if "limit" in reply:
            break
    json.dump(reply, sys.stdout)


def _rendered(render: Any, task: dict[str, Any], values: dict[str, Any]) -> dict[str, str]:
    try:
        text = render(task["source"], values)
        text.encode()  # fails for lone surrogates, which JSON cannot represent
    except MemoryError:
        return {"limit": f"it needs more than {task['memory_bytes']} bytes of memory"}
    except Exception as error:  # noqa: BLE001  the template is a stranger's; the caller reports it
        return {"error": f"{type(error).__name__}: {error}"[:1000].encode("utf-8", "replace").decode()}
    if len(text) > task["max_chars"]:
        return {"limit": f"its text has {len(text)} characters"}
    return {"text": text}


def render_template(source: str, values: Mapping[str, Any]) -> str:
    """Render a chat template in a sandbox, as transformers does. Raises errors of the template."""
    return _compiled(source).render(**values)


class _Generation(Extension):
    """Render the body of `{% generation %}` blocks, which mark assistant turns."""

    tags = {"generation"}  # noqa: RUF012  type declared by jinja2

    def parse(self, parser: Parser) -> Node | list[Node]:
        """Replace the block by its statements."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    functions: dict[str, Any] = {"raise_exception": _refuse, "strftime_now": _now}
    environment.globals.update(functions)
    return environment.from_string(source)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
