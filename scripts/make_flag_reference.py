"""Generate the page of flags from their declarations: a hook of mkdocs, or python scripts/make_flag_reference.py FILE.

The page is not committed: `furlong train --help` prints the same.
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from furlong.config import Config
from furlong.config.compat import MILES, SLIME, VALUES
from furlong.config.flag_spec import FlagSpec, flag_specs
from furlong.config.help import FILE_FLAGS, shown_default
from furlong.config.hooks import HOOKS

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

PAGE = "configuration.md"

INTRODUCTION = """\
# Flags

`furlong train`, `train.py`, `train_async.py` and `furlong doctor` share these flags. Names are slime's where slime has
the flag.

- `--flag value` and `--flag=value` are equivalent. Flags cannot be abbreviated. If a flag is given twice, the last one
  counts.
- `--config run.yaml` sets the same fields, flat or by section, with dashes or underscores. Command-line flags override
  it; `--custom-config-path` overrides both.
- An unknown flag or key, a value of the wrong type and incompatible values are errors, all shown together.
- A flag that would have no effect is an error too, unless its value is the default, so scripts may spell defaults out.
- `config.json` in the run folder contains every value and its source. A resumed run rewrites it once it has begun.

<div id="flag-filter"></div>

```yaml
rollout:
  hf-checkpoint: Qwen/Qwen3-0.6B
  rollout_max_response_len: 1024
lr: 1.0e-6
```
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page to the site."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, PAGE, content=render()))
    return files


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def flag_row(spec: FlagSpec) -> tuple[str, ...]:
    """Return the table row of one flag."""
    values = "" if spec.kind in ("switch", "off_switch") else spec.type_name
    if spec.within:
        values += f" in {spec.within.text}"
    specs = flag_specs(Config)
    needed: list[str] = []
    excluded = [f"`{specs[name].flag}`" for name in spec.excludes]
    for any_of in spec.needs:
        first, other = any_of[0], specs[any_of[0].field]
        if first.operator == ".":
            continue  # met by all algorithms of furlong
        if len(any_of) == 1 and first.operator == "!=":
            excluded.append(f"`{other.flag} {first.value}`")
        elif len(any_of) == 1 and other.kind == "off_switch":
            excluded.append(f"`{other.flag}`")
        else:
            needed.append(" or ".join(f"`{c.text(specs[c.field])}`" for c in any_of))
    facts = (f" Needs {' and '.join(needed)}." if needed else "") + (
        f" Excludes {', '.join(excluded)}." if excluded else ""
    )
    return f"`{spec.flag}`", values, shown_default(spec), spec.help + facts


def render() -> str:
    """Return the whole page."""
    lines = [INTRODUCTION, "## Files", "", *table(("flag", "meaning"), ((f"`{k}`", v) for k, v in FILE_FLAGS.items()))]
    for section, section_type in typing.get_type_hints(Config).items():
        specs = [spec for spec in flag_specs(Config).values() if spec.section == section]
        lines += ["", f"## {section}", "", (section_type.__doc__ or "").strip(), ""]
        lines += table(("flag", "values", "default", "meaning"), map(flag_row, specs))
    lines += ["", "## Functions that flags name", ""]
    lines += [
        "A path is `package.module.function` or `file.py:function`. A reward may also be `reward(response, label)`"
    ]
    lines += ["with the parameters that it needs, or have TRL's form"]
    lines += ["`reward_func(prompts, completions, **kwargs) -> list[float]`.", ""]
    lines += table(("flag", "signature"), ((f"`{hook.flag}`", f"`{hook.signature}`") for hook in HOOKS.values()))
    for program, refusals in {"slime": (*SLIME, *VALUES.values()), "Miles": MILES}.items():
        lines += ["", f"## Flags of {program} that are not accepted", ""]
        lines += ["Using one is an error with this text. `not yet` is a feature that this version lacks.", ""]
        rows = (
            (", ".join(f"`{name}`" for name in row.names), row.verdict.replace("-", " "), row.reason, row.instead)
            for row in refusals
        )
        lines += table(("flags", "", "reason", "use instead"), rows)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")
