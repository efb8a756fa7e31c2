"""Instruction following: the constraints of IFBench, checked by the package if-verifiable. Runs in the sandbox."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

from furlong.errors import DataError, RewardError

KEYS = '"instruction_id_list" and "kwargs", as in the dataset allenai/IFBench_test; check --metadata-key'


def ifbench_score(response: str, label: Any, metadata: Mapping[str, Any]) -> float:
    """Return 1.0 if the response follows all instructions of its row (the strict score of IFBench), else 0.0.

    Reads `instruction_id_list`, `kwargs` (an object per instruction, or one for all) and `prompt_text` of the row's
    metadata. Raises DataError for a row without instructions or with an unknown one, and RewardError if the checks
    need data of NLTK that is not installed.
    """
    del label
    names = metadata.get("instruction_id_list")
    if not isinstance(names, list | tuple) or not names:
        raise DataError(f"the metadata has no list of instructions; --rm-type ifbench reads {KEYS}")
    settings = _settings(metadata.get("kwargs"), len(names))
    if not response.strip():
        return 0.0
    prompt = str(metadata.get("prompt_text") or "")
    try:
        return float(
            all(_is_followed(str(name), kwargs, prompt, response) for name, kwargs in zip(names, settings, strict=True))
        )
    except LookupError as error:
        if "nltk" not in str(error).lower():
            raise
        raise RewardError(
            "--rm-type ifbench needs data of NLTK that is not installed; run "
            "`python -m nltk.downloader punkt punkt_tab stopwords averaged_perceptron_tagger_eng` once"
        ) from error


def _settings(kwargs: Any, count: int) -> list[dict[str, Any]]:
    rows = kwargs if isinstance(kwargs, list | tuple) else [kwargs or {}] * count
    if len(rows) != count or not all(isinstance(row, Mapping | None) for row in rows):
        raise DataError(
            f"the metadata has {count} instructions and kwargs {kwargs!r:.200}; --rm-type ifbench reads {KEYS}"
        )
    return [{key: value for key, value in (row or {}).items() if value is not None} for row in rows]


def _is_followed(name: str, kwargs: dict[str, Any], prompt: str, response: str) -> bool:
    checks = instruction_checks()
    if name not in checks:
        raise DataError(f"the instruction {name!r} is not one of IFBench's {len(checks)}; check the row's metadata")
    check = checks[name](name)
    check.build_description(**kwargs)
    if "prompt" in (check.get_instruction_args() or {}):
        check.build_description(prompt=prompt)
    return bool(check.check_following(response))


@functools.cache
def instruction_checks() -> Mapping[str, Any]:
    """Return the classes of if-verifiable's checks by IFBench's names of instructions."""
    import nltk

    with patch.object(nltk, "download", lambda *_, **__: False):  # the package downloads when it is imported
        from if_verifiable.ifbench.instructions_registry import INSTRUCTION_DICT
    return INSTRUCTION_DICT
