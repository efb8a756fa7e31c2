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
from furlong.config.command_line import load
from furlong.errors import ConfigError
from furlong.models.hf_folder import read_json
from furlong.tools.gpu_memory import DEVICES, device_bytes, local_device
from furlong.tools.memory_phases import GIB
from furlong.tools.memory_plan import MemoryPlan, plan_memory
from furlong.tools.plan_defaults import NODE, assumptions, shown

USAGE = f"""usage: furlong plan --hf-checkpoint DIR [--device NAME|GIB] [--gpus N]
                    [FLAGS] [--json]

predict the memory of each phase of a run on one GPU; the flags are those of
`furlong train`. For those that are left out a run of usual sizes is taken, and
said. Exit code 1 if it does not fit; the last line then has the smallest change
of flags after which it does. Neither a GPU nor weights are needed, only
config.json of --hf-checkpoint.

  --device NAME|GIB   the GPU, or its memory in GiB; known are
                      {", ".join([*DEVICES][:4])},
                      {", ".join([*DEVICES][4:])};
                      without it this machine's GPU, else an H100
  --gpus N            GPUs of the run, which trainer and engines share unless
                      a flag speaks of engines (1)
  --json              print JSON"""
FALLBACK = "h100"


def main(words: list[str]) -> int:
    """Print the plan; exit code 1 if a phase does not fit."""
    if not words or "-h" in words or "--help" in words:
        show(USAGE)
        return 0 if words else 2
    words = list(words)
    as_json = "--json" in words
    if as_json:
        words.remove("--json")
    name, size = _device(_taken(words, "--device", f"{', '.join(DEVICES)}, or the GPU's memory in GiB"))
    gpus = _count(_taken(words, "--gpus", "the number of GPUs"))
    assumed = assumptions(words, gpus=gpus, device_bytes=size)
    if gpus is not None and not assumed:
        raise ConfigError(
            f"--gpus {gpus} has no effect on a command that can be run as it is; give --actor-num-gpus-per-node, "
            "--rollout-num-gpus and --colocate"
        )
    config = load(words, preset=assumed).config
    folder = Path(str(config.rollout.hf_checkpoint))
    plan = plan_memory(config, read_json(folder / "config.json"), size)
    if as_json:
        show(json.dumps(plan.record() | {"device": name, "assumed": shown(assumed)}, indent=1))
    else:
        told = f"assumed, as no flag says it: {shown(assumed)}\n\n" if shown(assumed) else ""
        show(told + _text(plan, name))
    return 0 if plan.fits else 1


def _taken(words: list[str], flag: str, wanted: str) -> str | None:
    """Take a flag of this command and its value out of the words. Raises ConfigError for one without a value."""
    if flag not in words:
        return None
    at = words.index(flag)
    if at + 1 == len(words) or words[at + 1].startswith("--"):
        raise ConfigError(f"{flag} got nothing; give {wanted}")
    value = words[at + 1]
    del words[at : at + 2]
    return value


def _device(name: str | None) -> tuple[str, int]:
    """Name and bytes of the GPU that is planned for."""
    if name is not None:
        return name, device_bytes(name)
    return local_device() or (FALLBACK, device_bytes(FALLBACK))


def _count(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isdigit() and int(text)):
        raise ConfigError(f"--gpus {text}: wanted a positive number")
    if int(text) > NODE and int(text) % NODE:
        raise ConfigError(f"--gpus {text}: machines have {NODE} GPUs; give a multiple of {NODE}, or less than that")
    return int(text)


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
        table.add_row(who, phase.name, f"{phase.total / GIB:.1f}{mark}", "; ".join(filter(None, (parts, phase.note))))
    out = io.StringIO()
    Console(file=out, width=min(max(shutil.get_terminal_size((120, 24)).columns, 60), 120)).print(table)
    lines = [out.getvalue().rstrip()]
    if plan.most_fraction is not None:
        lines.append(
            "trainer and engine take turns on the GPU (--colocate); beside what the trainer keeps the engine can have "
            f"--sglang-mem-fraction-static {plan.most_fraction:.2f} at most"
        )
    lines.append("how sure: " + "; ".join(f"{part} {how}" for part, how in plan.sure.items()))
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
