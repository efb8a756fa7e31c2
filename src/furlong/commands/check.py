"""`furlong check`: check a directory of weights."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from furlong.commands.output import findings_code, show_findings, show_json
from furlong.core.catalogue import Diagnosis, diagnosis
from furlong.errors import CheckpointError, ConfigError
from furlong.tools.weight_values import check_weights


def main(words: list[str]) -> int:
    """Check a Hugging Face model, a --save directory or a Megatron-LM checkpoint; exit code 1 on a problem."""
    parser = argparse.ArgumentParser(prog="furlong check", allow_abbrev=False, description=main.__doc__)
    parser.add_argument("folder", metavar="DIR", type=Path, help="model, --save directory, or one iter_* of it")
    parser.add_argument("--headers-only", action="store_true", help="do not read tensor values")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--hf-checkpoint", metavar="DIR", type=Path, help="also check that a Megatron-LM checkpoint matches this model"
    )
    options = parser.parse_args(words)
    found = _findings(options.folder, options.hf_checkpoint, with_values=not options.headers_only)
    if options.json:
        show_json(found, folder=str(options.folder))
    else:
        what = "files and layers" if options.headers_only else "files, layers and values"
        show_findings(found, well=f"{options.folder}: {what} are complete")
    return findings_code(found)


def _findings(folder: Path, model: Path | None, *, with_values: bool) -> list[Diagnosis]:
    from furlong.tools.dist_checkpoint import check_dist, dist_folder

    dist = dist_folder(folder)
    if dist is None and model is not None:
        raise ConfigError(f"--hf-checkpoint has no effect: {folder} is not a Megatron-LM checkpoint; remove it")
    if dist is None:
        return check_weights(folder, with_values=with_values)
    found = check_dist(dist, with_values=with_values)
    if model is None or any(each.severity == "error" for each in found):
        return found
    try:
        with conversion().open_weights(dist, model):
            return found
    except CheckpointError as error:
        remedy = "give the Hugging Face model that was saved"
        return [*found, diagnosis("CKPT04", str(error), cause="The two are different models.", remedy=remedy)]


def conversion() -> Any:
    """Return the module `training.megatron.convert_weights`. Raises ConfigError without Megatron-core."""
    from furlong.training.megatron import megatron_compat as compat

    compat.prepare()
    from furlong.training.megatron import convert_weights

    return convert_weights
