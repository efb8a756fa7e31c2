"""What `furlong check` verifies beside weights: folders of runs, dumps of rollouts, and bundles."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from furlong.catalogue import Diagnosis, diagnosis
from furlong.data.audit import audit
from furlong.data.ledger import check_mark, parse_event
from furlong.diagnosis.postmortem.recorded_run import RecordedRun
from furlong.errors import FurlongError
from furlong.files.checkpoint_folder import find_complete_folders, read_state
from furlong.files.sample_file import check_dump, load_samples
from furlong.tools.run_bundle import read_bundle, unpack
from furlong.tools.weight_values import check_weights

LEDGER = "ledger.jsonl"


def check_saved(path: Path) -> list[Diagnosis] | None:
    """Verify a run's folder, a folder of dumps, one dump or a bundle, without a model; None for anything else.

    Of a run's folder also the dumps and checkpoints that its flags name, as far as they are there.
    """
    if path.is_file():
        return _problems(path, lambda: _read_bundle(path) if path.suffix == ".zip" else _read_dump(path))
    if (path / LEDGER).is_file():
        return list(_of_run(path))
    dumps = [each for each in sorted(path.iterdir()) if _is_dump(each)] if path.is_dir() else []
    return [finding for each in dumps for finding in _problems(each, lambda each=each: _read_dump(each))] or (
        [] if dumps else None
    )


def _of_run(folder: Path) -> Iterator[Diagnosis]:
    def read() -> list[Diagnosis]:
        run = RecordedRun.read(folder)
        found = run.damage(is_running=True)
        checkpoint, debug = run.config.checkpoint, run.config.debug
        if debug.save_debug_rollout_data is not None:
            template = Path(debug.save_debug_rollout_data)
            for path in sorted(template.parent.glob(template.name.replace("{rollout_id}", "*"))):
                found += _problems(path, lambda path=path: _read_dump(path))
        saved = [] if checkpoint.save is None else find_complete_folders(Path(checkpoint.save))
        if saved:
            found += check_weights(saved[-1], with_values=True)
            found += _problems(folder / LEDGER, lambda: _compare_mark(folder / LEDGER, saved[-1]))
        return found

    yield from _problems(folder, read)
    yield from _problems(folder / LEDGER, lambda: _read_ledger(folder / LEDGER))


def _problems(path: Path, read: Callable[[], list[Diagnosis]]) -> list[Diagnosis]:
    try:
        return read()
    except (FurlongError, OSError) as error:
        finding, _, remedy = str(error).rpartition("; ")
        return [
            diagnosis(
                "DATA01",
                finding or remedy,
                cause="The file was changed, cut off or copied incompletely, or is something else.",
                remedy=remedy if finding else "restore it from an intact copy",
                evidence={"file": str(path)},
            )
        ]


def _read_ledger(path: Path) -> list[Diagnosis]:
    result = audit(path)
    return [
        diagnosis("DATA01", f"{path}: {problem}", cause="", remedy="`furlong report` shows the whole audit")
        for problem in result.problems
    ]


def _compare_mark(path: Path, checkpoint: Path) -> list[Diagnosis]:
    mark = read_state(checkpoint)["ledger"]
    with path.open("rb") as file:
        start = parse_event(file.readline())
    if start is None or start.get("id") == mark["id"]:  # else of another run, which continued from the same folder
        check_mark(path, mark)
    return []


def _read_dump(path: Path) -> list[Diagnosis]:
    load_samples(path, int(path.stem) if path.stem.isdecimal() else None)
    return []


def _read_bundle(path: Path) -> list[Diagnosis]:
    bundle = read_bundle(path)
    with tempfile.TemporaryDirectory() as folder:
        unpack(path, bundle, Path(folder))
        load_samples(Path(folder) / f"{bundle.step - 1}.safetensors", bundle.step - 1)
    return []


def _is_dump(path: Path) -> bool:
    try:
        check_dump(path)
    except FurlongError:
        return path.suffix not in ("", ".json") and path.stem.removeprefix("eval_").isdecimal()  # the name of one
    return True
