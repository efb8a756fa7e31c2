"""The process that renders a chat template of a request: reads a task from stdin and writes {"text"} or {"error"}.

It limits its own memory and CPU time, and imports neither torch nor transformers.
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
    try:
        text = render_template(task["source"], task["values"])
        text.encode()  # fails for lone surrogates, which JSON cannot represent
    except MemoryError:
        reply = {"error": f"it needs more than {task['memory_bytes']} bytes of memory"}
    except Exception as error:  # noqa: BLE001  the template is a stranger's; the server reports it
        reply = {"error": f"{type(error).__name__}: {error}"[:1000].encode("utf-8", "replace").decode()}
    else:
        too_long = len(text) > task["max_chars"]
        reply = {"error": f"its text has {len(text)} characters"} if too_long else {"text": text}
    json.dump(reply, sys.stdout)
