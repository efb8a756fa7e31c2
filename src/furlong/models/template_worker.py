"""The process that renders a chat template: reads a task from stdin and writes {"text"}, {"error"} or {"limit"}.

It limits its own memory and processor time, and imports neither torch nor transformers. A task has the values of one
rendering, or a list of them of which the last text is returned. "limit" is the limit that was exceeded.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Render one template."""
    from furlong.models.tokenizer import render_template

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
