"""Faults of what a run continues or replays: found before the start, each with its fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from faults.test_preflight_checkpoints import write_checkpoint
from faults.world import names, only
from faults_marker import fault
from furlong.core.sample import Group, Sample
from furlong.data.prompt import PromptFormat
from furlong.data.prompt_path import PromptDataPath
from furlong.data.source import prompt_settings
from furlong.files.manifest import write_manifest
from furlong.tracking.rollout_dump import save_samples


def rewrite_manifest(folder: Path) -> None:
    write_manifest(folder, 3)


@fault("CKPT01")
def test_a_checkpoint_of_other_data(world):
    save = world.folder / "save"
    folder = write_checkpoint(save, 3)
    settings = prompt_settings(
        PromptDataPath.parse(str(world.data)), PromptFormat(label_key="label"), skip_bad_rows=False
    )
    settings |= {"streaming": False, "num_prompts": 24, "shuffle": False, "rollout_seed": 42}
    asked = {"load": save, "num_rollout": 9, "rollout_seed": 42}

    def write_state(**changes: Any) -> None:
        state = {"ahead": [], "ledger": {}, "source": {"settings": settings | changes}}
        (folder / "state.json").write_text(json.dumps(state))
        rewrite_manifest(folder)

    write_state()
    only(world.look(**asked), "CKPT06", "info")
    write_state(size=1)
    found = only([each for each in world.look(**asked) if each.id != "CKPT06"], "CKPT01")
    assert names(found.finding, "other data", "size was 1")
    assert "--finetune" in found.remedy
    write_state()
    found = only([each for each in world.look(**asked | {"rollout_seed": 7}) if each.id != "CKPT06"], "CKPT01")
    assert "rollout_seed was 42, is 7" in found.finding


@fault("DATA01")
def test_dumps_after_the_first_are_looked_at(world):
    template = world.folder / "dumps" / "{rollout_id}.pt"
    for number in range(3):
        save_samples(
            str(template).format(rollout_id=number),
            number,
            [Group(0, [Sample(tokens=[1, 2], response_length=1, index=i) for i in range(2)])],
        )
    sizes = {"rollout_batch_size": 1, "n_samples_per_prompt": 2}
    asked = {"load_debug_rollout_data": template, "num_rollout": 3, "prompt_data": None, "label_key": None} | sizes
    assert [each.text() for each in world.look(**asked) if each.severity == "error"] == []
    found = only(
        [each for each in world.look(**asked | {"n_samples_per_prompt": 4}) if each.severity == "error"], "CFG01"
    )
    assert names(found.finding, "2 rollouts do not fill optimizer steps of 4")
    last = world.folder / "dumps" / "2.pt"
    content = last.read_bytes()
    last.write_bytes(b"PK\x03\x04" + content)
    found = only([each for each in world.look(**asked) if each.severity == "error"], "DATA01")
    assert names(found.finding, str(last), "pickled")
    last.write_bytes(b"{}")
    found = only([each for each in world.look(**asked) if each.severity == "error"], "DATA01")
    assert str(last) in found.finding
    for name, other in ((last, 1), (world.folder / "dumps" / "0.pt", 2)):
        last.write_bytes(content)
        intact = name.read_bytes()
        name.write_bytes(Path(str(template).format(rollout_id=other)).read_bytes())
        found = only([each for each in world.look(**asked) if each.severity == "error"], "DATA01")
        assert names(found.finding, str(name), f"the dump of rollout {other}", f"that of rollout {name.stem}")
        name.write_bytes(intact)
    last.unlink()
    found = only([each for each in world.look(**asked) if each.severity == "error"], "CFG05")
    assert names(found.finding, "1 of 3", str(last))
    assert "--num-rollout 2" in found.remedy
    last.mkdir()
    found = only([each for each in world.look(**asked) if each.severity == "error"], "CFG05")
    assert f"{last} is a folder, not a file" in found.finding


@pytest.mark.parametrize("data", [b"PK\x03\x04", b"\x80\x04"])
def test_a_first_dump_of_slime_is_refused(world, data):
    (world.folder / "0.pt").write_bytes(data)
    asked = {"load_debug_rollout_data": world.folder / "{rollout_id}.pt", "num_rollout": 1}
    found = [each for each in world.look(**asked) if each.severity == "error"]
    assert [each.id for each in found] == ["DATA01"]
    assert "pickled" in found[0].finding
