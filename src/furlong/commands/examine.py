"""`furlong doctor --run DIR`: examine a run directory."""

from __future__ import annotations

import json
from pathlib import Path

from furlong.commands.output import show, show_findings


def examine_run(folder: Path, *, as_json: bool) -> int:
    """Print the status of a run and its problems; exit code 1 if there are any. Raises ConfigError if it is no run."""
    from furlong.diagnosis.postmortem.run_examination import examine

    result = examine(folder)
    if as_json:
        show(json.dumps(result.record(), indent=1))
    else:
        show(result.headline())
        show_findings(result.found, well="no problems found")
        if result.last_words:
            show("\n".join(["", *result.last_words]))
    return 0 if result.is_healthy else 1
