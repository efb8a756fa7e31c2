"""`furlong plan`: how much memory each phase of a run needs on a GPU."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from furlong.commands.output import show
from furlong.config.flags import load
from furlong.doctor.devices import DEVICES, device_bytes
from furlong.doctor.memory import GIB
from furlong.doctor.plan import MemoryPlan, plan_memory
from furlong.errors import ConfigError
from furlong.models.folder import read_json

USAGE = f"""usage: furlong plan FLAGS --device NAME|GIB [--json]

predict the memory of each phase of a run on one GPU; the flags are those of
`furlong train`. Exit code 1 if it does not fit; the last line then has the
smallest change of flags after which it does. Neither a GPU nor weights are
needed, only config.json of --hf-checkpoint.

  --device NAME|GIB   the GPU, or its memory in GiB; known are
                      {", ".join([*DEVICES][:4])},
                      {", ".join([*DEVICES][4:])}
  --json              print JSON"""


def main(words: list[str]) -> int:
    """Print the plan; exit code 1 if a phase does not fit."""
    if not words or "-h" in words or "--help" in words:
        show(USAGE)
        return 0 if words else 2
    words = list(words)
    as_json = "--json" in words
    if as_json:
        words.remove("--json")
    if "--device" not in words or words.index("--device") + 1 == len(words):
        raise ConfigError(f"furlong plan needs --device: {', '.join(DEVICES)}, or the GPU's memory in GiB")
    at = words.index("--device")
    name = words[at + 1]
    del words[at : at + 2]
    size = device_bytes(name)
    config = load(words).config
    folder = Path(str(config.rollout.hf_checkpoint))
    plan = plan_memory(config, read_json(folder / "config.json"), size)
    show(json.dumps(plan.record(), indent=1) if as_json else _text(plan, name))
    return 0 if plan.fits else 1


def _text(plan: MemoryPlan, name: str) -> str:
    table = Table(
        title=f"one {name}: {plan.device_bytes / GIB:.1f} GiB, {plan.limit / GIB:.1f} to use",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("who")
    table.add_column("phase")
    table.add_column("GiB", justify="right")
    table.add_column("of which")
    others = {"engine": plan.engine, "host": plan.host}
    phases = [
        *(("trainer", phase) for phase in plan.trainer),
        *((who, phase) for who, phase in others.items() if phase),
    ]
    for who, phase in phases:
        parts = ", ".join(f"{part} {size / GIB:.1f}" for part, size in phase.parts.items() if size > 0.05 * GIB)
        mark = "" if phase.total <= plan.limit or who == "host" else "  too much"
        table.add_row(
            who, phase.name, f"{phase.total / GIB:.1f}{mark}", parts + (f"; {phase.note}" if phase.note else "")
        )
    out = io.StringIO()
    Console(file=out, width=min(max(shutil.get_terminal_size((120, 24)).columns, 60), 120)).print(table)
    lines = [out.getvalue().rstrip()]
    if plan.most_fraction is not None:
        lines.append(
            "trainer and engine take turns on the GPU (--colocate); beside what the trainer keeps the engine can have "
            f"--sglang-mem-fraction-static {plan.most_fraction:.2f} at most"
        )
    if plan.fits:
        lines.append(f"it fits; micro-batches may have up to --max-tokens-per-gpu {plan.most_tokens}")
    else:
        lines.append(f"it does not fit; the smallest change that does: {plan.change}")
    if plan.least_fraction is not None:
        lines.append(
            f"all requests at full length need --sglang-mem-fraction-static {min(plan.least_fraction, 1):.2f}"
            if plan.least_fraction <= 1
            else f"all requests at full length need {plan.least_fraction:.1f} GPUs; SGLang lets some wait"
        )
    return "\n".join(lines)
