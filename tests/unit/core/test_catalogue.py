from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from furlong.catalogue import CATALOGUE, MOMENTS, diagnosis, find_row, most_severe_first
from furlong.config.compat import find_refusal
from furlong.config.flag_spec import flag_specs
from furlong.config.help import FILE_FLAGS
from furlong.config.passthrough import find, program_of
from furlong.config.sections import Config
from furlong.errors import ConfigError

SOURCE = Path(__file__).resolve().parents[3] / "src" / "furlong"
# Of pip, hf, ps, SGLang, and of furlong's commands other than train.
OF_OTHER_COMMANDS = """
    --local-dir --no-build-isolation --force-reinstall --no-deps --sort --query-gpu --query-compute-apps --format
    --pid --run --list --explain --json --metric --device --step --template --thinking --host --port --response
    --with-checkpoint --enable-memory-saver --mem-fraction-static --kv-cache-dtype --shm-size --ipc --mem --calibrate
    --ulimit --pids-limit --gpus --time --requeue --exclude --object-store-memory
    --help --context-length
"""


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", text)) - set(OF_OTHER_COMMANDS.split())


def untaken(flags: set[str]) -> set[str]:
    """Those that a run does not take: unknown, or refused in this version."""
    taken = {spec.flag for spec in flag_specs(Config).values()} | set(FILE_FLAGS)
    taken |= {flag.replace("--", "--no-", 1) for flag in taken}
    return {flag for flag in flags - taken if program_of(flag) is None or not find(flag)}


def test_every_flag_in_a_row_is_accepted() -> None:
    for id in CATALOGUE:
        row = CATALOGUE[id]
        assert untaken(flags_in(f"{row.title} {row.checked} {row.remedy}")) == set()
        assert {flag for flag in untaken(flags_in(row.cause)) if find_refusal(flag) is None} == set()


def test_every_flag_in_a_message_of_the_doctor_is_accepted() -> None:
    for path in [path for package in ("catalogue", "diagnosis", "tools") for path in (SOURCE / package).rglob("*.py")]:
        texts = [n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)]
        named = flags_in(" ".join(text for text in texts if isinstance(text, str)))
        assert {flag for flag in untaken(named) if find_refusal(flag) is None} == set(), path


def test_rows_are_complete() -> None:
    for id, row in CATALOGUE.items():
        assert re.fullmatch(r"[A-Z]+\d\d", id)
        assert id == row.id
        assert row.moments
        assert set(row.moments) <= set(MOMENTS)
        assert all(text.endswith(".") for text in (row.symptom, row.cause, row.checked))
        assert row.remedy
        assert set(row.record()) == set(row.__dataclass_fields__) - {"remedy"} | {"way_out"}


def test_a_diagnosis_takes_severity_and_cause_from_its_row() -> None:
    result = diagnosis("CKPT02", "no iter_0000007", remedy="use --ckpt-step 8", evidence={"steps": [8]})
    assert (result.severity, result.cause) == ("error", CATALOGUE["CKPT02"].cause)
    assert result.record()["evidence"] == {"steps": [8]}


def test_a_diagnosis_may_lower_but_not_raise_the_severity_of_its_row() -> None:
    assert diagnosis("NUM01", "KL 2e-4", remedy="check --ref-load", severity="warning").severity == "warning"
    with pytest.raises(ValueError, match="ENV01 is at most warning"):
        diagnosis("ENV01", "torch 1.0", remedy="upgrade", severity="error")


def test_an_unknown_id_suggests_the_closest() -> None:
    assert find_row("ckpt01").id == "CKPT01"
    with pytest.raises(ConfigError, match="did you mean CKPT0"):
        find_row("CKPT011")


def test_sorting_by_severity_is_stable() -> None:
    ids = ("CKPT05", "ENV01", "CFG01", "ENV02", "CFG02")
    result = most_severe_first([diagnosis(id, "x", remedy="y") for id in ids])
    assert [d.id for d in result] == ["CFG01", "CFG02", "ENV01", "ENV02", "CKPT05"]
