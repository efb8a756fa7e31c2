"""Faults of dumps that a run replays: found before the start, each with its fix."""

from __future__ import annotations

from faults.world import names, only
from faults_marker import fault
from furlong.core.sample import Group, Sample
from furlong.files.sample_file import save_samples


@fault("DATA01")
def test_dumps_that_are_missing_or_something_else(world):
    template = world.folder / "{rollout_id}.pt"
    for number in range(3):
        samples = [Sample(tokens=[1, 2], response_length=1, index=i) for i in range(2)]
        save_samples(str(template).format(rollout_id=number), number, [Group(0, samples)])
    sizes = {"rollout_batch_size": 1, "n_samples_per_prompt": 2}
    asked = {"load_debug_rollout_data": template, "num_rollout": 3, "prompt_data": None, "label_key": None} | sizes

    def errors():
        return [each for each in world.look(**asked) if each.severity == "error"]

    assert errors() == []
    first, last = world.folder / "0.pt", world.folder / "2.pt"
    intact = first.read_bytes()
    for content in (b"PK\x03\x04", b"\x80\x04"):
        first.write_bytes(content)
        assert names(only(errors(), "DATA01").finding, first, "pickled")
    first.write_bytes(last.read_bytes())
    assert names(only(errors(), "DATA01").finding, first, "the dump of rollout 2")
    first.write_bytes(intact)
    last.unlink()
    found = only(errors(), "CFG05")
    assert names(found.finding, "1 of 3", last)
    assert "--num-rollout 2" in found.remedy
