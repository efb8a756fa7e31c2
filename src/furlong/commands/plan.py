"""`furlong plan`: predict the GPU memory of each phase of a run."""

from __future__ import annotations

import io
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from furlong.commands.output import Report, show, terminal_width
from furlong.config.command_line import load
from furlong.core.model_config import read_json
from furlong.errors import ConfigError
from furlong.tools.chosen_sizes import with_chosen_sizes
from furlong.tools.gpu_memory import DEVICES, device_bytes, local_device
from furlong.tools.memory_formulas import GIB
from furlong.tools.memory_plan import NODE, MemoryPlan, assumptions, plan_memory, shown

USAGE = f"""usage: furlong plan --hf-checkpoint DIR [--device NAME|GIB] [--gpus N]
                    [FLAGS] [--json]

Predict the memory of each phase of a run on one GPU. FLAGS are those of
`furlong train`; missing sizes are assumed and listed. Exit code 1 if the run
does not fit; the last line then shows the smallest change of flags that makes
it fit. Needs no GPU and no weights, only config.json of --hf-checkpoint.

  --device NAME|GIB   the GPU, or its memory in GiB; known GPUs are
                      {", ".join([*DEVICES][:4])},
                      {", ".join([*DEVICES][4:])};
                      default: the GPU of this machine, else an H100
  --gpus N            GPUs of the run (default: 1); trainer and engines share
                      them unless a flag places the engines
  --json              print JSON"""
FALLBACK = "h100"


def plan(words: list[str]) -> int:
    """Print the plan; exit code 1 if the run does not fit."""
    if not words or "-h" in words or "--help" in words:
        show(USAGE)
        return 0 if words else 2
    report = Report(as_json="--json" in words)
    words = [word for word in words if word != "--json"]
    name, size = _device(_pop_value(words, "--device", f"{', '.join(DEVICES)}, or the GPU's memory in GiB"))
    gpus = _count(_pop_value(words, "--gpus", "the number of GPUs"))
    assumed = assumptions(words, gpus=gpus, device_bytes=size)
    if gpus is not None and not assumed:
        raise ConfigError(
            f"--gpus {gpus} has no effect on a complete command; use --actor-num-gpus-per-node, "
            "--rollout-num-gpus and --colocate"
        )
    resolved = load(words, preset=assumed, weights=False)
    model_config = read_json(Path(str(resolved.config.rollout.hf_checkpoint)) / "config.json")
    config, _, chosen = with_chosen_sizes(resolved.config, resolved.sources, model_config, size)
    memory = plan_memory(config, model_config, size)
    report.record(memory.record() | {"device": name, "assumed": shown(assumed), "chosen": chosen})
    notes = [f"assumed: {shown(assumed)}"] if assumed else []
    notes += [f"chosen by the run: {line}" for line in chosen]
    cluster = config.cluster
    how = "use the GPU in turn" if cluster.offload_train or cluster.offload_rollout else "stay on the GPU together"
    report.text(*([*notes, ""] if notes else []), _text(memory, name, how))
    return 0 if memory.fits else 1


def _pop_value(words: list[str], flag: str, what: str) -> str | None:
    if flag not in words:
        return None
    at = words.index(flag)
    if at + 1 == len(words) or words[at + 1].startswith("--"):
        raise ConfigError(f"{flag} got nothing; give {what}")
    value = words[at + 1]
    del words[at : at + 2]
    return value


def _device(name: str | None) -> tuple[str, int]:
    if name is not None:
        return name, device_bytes(name)
    return local_device() or (FALLBACK, device_bytes(FALLBACK))


def _count(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isdigit() and int(text)):
        raise ConfigError(f"--gpus {text} is not a positive number; give the number of GPUs of the run")
    if int(text) > NODE and int(text) % NODE:
        raise ConfigError(f"--gpus {text} does not fill machines of {NODE} GPUs; give a multiple of {NODE}, or fewer")
    return int(text)


def _text(plan: MemoryPlan, name: str, how: str) -> str:
    table = Table(
        title=f"one {name}: {plan.device_bytes / GIB:.1f} GiB, {plan.limit / GIB:.1f} usable",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("part")
    table.add_column("phase")
    table.add_column("GiB", justify="right")
    table.add_column("breakdown")
    for who, phase in [*plan.phases, *([("host", plan.host)] if plan.host else [])]:
        parts = ", ".join(f"{part} {size / GIB:.1f}" for part, size in phase.parts.items() if size > 0.05 * GIB)
        mark = "" if phase.total <= plan.limit or who == "host" else "  does not fit"
        table.add_row(who, phase.name, f"{phase.total / GIB:.1f}{mark}", "; ".join(filter(None, (parts, phase.note))))
    out = io.StringIO()
    Console(file=out, width=terminal_width()).print(table)
    lines = [out.getvalue().rstrip()]
    if plan.most_fraction is not None:
        lines.append(
            f"trainer and engine {how} (--colocate); next to the trainer, the engine can use at most "
            f"--sglang-mem-fraction-static {plan.most_fraction:.2f}"
        )
    if plan.fits:
        lines.append(f"it fits, with up to --max-tokens-per-gpu {plan.most_tokens}")
    else:
        lines.append(f"it does not fit; smallest change that fits: {plan.change}")
    if plan.least_fraction is not None:
        lines.append(
            f"all requests at full length need --sglang-mem-fraction-static {min(plan.least_fraction, 1):.2f}"
            if plan.least_fraction <= 1
            else f"all requests at full length need {plan.least_fraction:.1f} GPUs; SGLang queues the rest"
        )
    return "\n".join(lines)
