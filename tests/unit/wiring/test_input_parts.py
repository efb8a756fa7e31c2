"""The inputs that a resumed run compares with its checkpoint."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from furlong.config import parse
from furlong.core.user_functions import use_objects
from furlong.files.run_inputs import RunInputs
from furlong.wiring.build import prompt_files
from furlong.wiring.rollout import prompt_paths


def write_rows(path: Path) -> None:
    rows = [{"input": f"{number}+1=", "label": str(number + 1)} for number in range(10_000)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_middle_of_an_environments_own_prompt_file_is_compared(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    for path in paths:
        write_rows(path)
    entries = [f"mine:Game?name={path.stem}&prompt_data={path}" for path in paths]
    config = parse(["--environment", *entries, "--prompt-data", str(paths[0])]).config
    assert prompt_paths(config) == [str(path) for path in paths]

    def inputs() -> RunInputs:
        made = RunInputs([prompt_files(prompt_paths(config))])
        made.start()
        return made

    saved = asyncio.run(inputs().record())
    assert asyncio.run(inputs().changes(saved, ["data"])) == []
    content = paths[1].read_bytes()
    middle = content.index(b'"5000+1="')
    paths[1].write_bytes(content[:middle] + b'"5000+2="' + content[middle + 9 :])
    [change] = asyncio.run(inputs().changes(saved, ["data"]))
    assert (change.kind, str(paths[1]) in change.text) == ("data", True)


def test_rows_of_the_calling_program_are_compared() -> None:
    def inputs(label: str) -> RunInputs:
        use_objects({"rows": [{"prompt": "1+1=", "label": label}]})
        made = RunInputs([prompt_files(["python:rows"])])
        made.start()
        return made

    saved = asyncio.run(inputs("2").record())
    assert asyncio.run(inputs("2").changes(saved, ["data"])) == []
    assert [change.kind for change in asyncio.run(inputs("3").changes(saved, ["data"]))] == ["data"]
    use_objects({})


def test_environments_without_prompts_of_their_own_share_one_file(tmp_path: Path) -> None:
    config = parse(["--environment", "mine:A", "mine:B", "--prompt-data", "p.jsonl"]).config
    assert prompt_paths(config) == ["p.jsonl", "p.jsonl"]
    assert prompt_paths(parse(["--prompt-data", "p.jsonl"]).config) == ["p.jsonl"]
