"""A run that resumes after something that it stands on was changed."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from furlong.commands.inspect_run import report
from furlong.config.command_line import load
from furlong.errors import CheckpointError
from furlong.wiring.build import build
from runs import flags, train, write_model, write_prompts


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with a checkpoint, its model and its data."""
    folder = tmp_path_factory.mktemp("original")
    write_model(folder / "model")
    write_prompts(folder / "prompts.jsonl", 600)
    train(argv(folder))
    return folder


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path / "copy")
    return tmp_path / "copy"


def argv(folder: Path, *more: Any, **changes: Any) -> list[str]:
    values = {"save": folder / "save", "apply_chat_template": True, "num_rollout": 1} | changes
    return flags(folder / "model", folder / "prompts.jsonl", folder / "run", *more, **values)


def resume(folder: Path, *more: Any, **changes: Any) -> None:
    """Restore everything as a resumed run does, without training."""

    async def restored() -> None:
        built = build(load(argv(folder, "--load", folder / "save", *more, **changes)), folder / "run")
        try:
            await built.checkpoints.restore(built.parts)
            built.checkpoints.record_changes(built.parts)
        finally:
            await built.close()
            built.close_files()

    asyncio.run(restored())


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_lines(path: Path, change: Callable[[list[str]], None]) -> None:
    lines = path.read_text().splitlines()
    change(lines)
    path.write_text("\n".join(lines) + "\n")


def relabel(lines: list[str]) -> None:
    lines[400] = lines[400].replace('"label": "1200"', '"label": "1201"')


def shuffle_ids(folder: Path) -> None:
    path = folder / "model" / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(content))


def edit_template(folder: Path) -> None:
    path = folder / "model" / "chat_template.jinja"
    path.write_text(path.read_text() + "{# changed #}x")


def edit_tensor(folder: Path) -> None:
    path = folder / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] += 1
    save_file(tensors, path, {"format": "pt"})


def edit_config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "model" / "config.json", **changes)


CHANGES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a wrong label": ("data", lambda folder: edit_lines(folder / "prompts.jsonl", relabel)),
    "shuffled ids": ("tokenizer", shuffle_ids),
    "another template": ("chat-template", edit_template),
    "another weight": ("weights", edit_tensor),
    "rms_norm_eps": ("config", edit_config(rms_norm_eps=0.1)),
    "generation": ("config", lambda folder: edit_json(folder / "model" / "generation_config.json", eos_token_id=1)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_underneath_is_refused_unless_it_is_accepted(name: str, saved: Path) -> None:
    kind, change = CHANGES[name]
    change(saved)
    with pytest.raises(CheckpointError, match=f"{kind}: the content of .*--allow-changed-inputs {kind}"):
        resume(saved)
    resume(saved, allow_changed_inputs=[kind])
    events = [json.loads(line) for line in (saved / "run" / "events.jsonl").read_text().splitlines()]
    (event,) = [event for event in events if event["event"] == "inputs_changed"]
    assert {change["kind"] for change in event["changes"]} == {kind}


def test_unchanged_inputs_are_accepted_at_another_path_and_from_another_tool(saved: Path) -> None:
    edit_json(saved / "model" / "config.json", transformers_version="4.0.0")
    resume(saved)


def test_all_changes_are_named_at_once(saved: Path) -> None:
    shuffle_ids(saved)
    edit_config(rope_theta=5.0, hidden_act="gelu")(saved)
    with pytest.raises(CheckpointError, match=r"tokenizer: .*; config: .*--allow-changed-inputs config tokenizer"):
        resume(saved)
    with pytest.raises(CheckpointError, match="--allow-changed-inputs tokenizer"):
        resume(saved, allow_changed_inputs=["config"])


@pytest.mark.parametrize("streaming", [False, True])
def test_a_run_continues_with_accepted_data_and_its_audit_holds(streaming: bool, model: Path, tmp_path: Path) -> None:
    data, save = write_prompts(tmp_path / "prompts.jsonl", 10), tmp_path / "save"
    stream = {"streaming_data": True} if streaming else {}

    def go(num_rollout: int, **changes: Any) -> int:
        run = {"num_rollout": num_rollout, "save": save, "rollout_shuffle": True} | stream | changes
        return train(flags(model, data, tmp_path / "run", **run))

    assert go(2) == 2
    write_prompts(data, 13)
    with pytest.raises(CheckpointError, match="data: the content of --prompt-data"):
        go(6, load=save)
    assert go(6, load=save, allow_changed_inputs=["data"]) == 6
    assert go(8, load=save) == 8
    assert report([str(tmp_path / "run"), "--finished"]) == 0
