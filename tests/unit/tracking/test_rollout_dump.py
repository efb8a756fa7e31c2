from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.core.outcome import Outcome
from furlong.core.sample import Group, Sample, Status
from furlong.errors import DataError
from furlong.files import sample_file as dump
from furlong.files.sample_file import load_samples, save_samples
from furlong.tracking import rollout_dump
from furlong.tracking.rollout_dump import RolloutDumps


def round_trip(tmp_path, groups, name="d.safetensors"):
    save_samples(tmp_path / name, 3, groups)
    return load_samples(tmp_path / name)


def test_every_field_is_restored(tmp_path):
    full = Sample(
        group_index=1, index=2, rollout_id=3, prompt=[{"role": "user", "content": "hi \ud800"}], tokens=[1, 2, 300_000],
        response="ok", response_length=2, label={"a": (1, 2)}, reward={"score": 1.0, "why": None},
        outcome=Outcome.scored({"score": 1.0}), loss_mask=[1, 0], weight_versions=["3", "4"], token_versions=[3, 4],
        rollout_log_probs=[-0.1, -1e-300], teacher_log_probs=[-0.5, 0.0], teacher_mask=[1, 0], remove_sample=True,
        status=Status.TRUNCATED,
        metadata={"n": 10**30, "deep": {"$odd": [1.5, True], 7: "int key"}, "f": 0.1}, train_metadata={"x": 1},
        apply_chat_template_kwargs={"enable_thinking": False}, tools=[{"name": "t"}], generate_function_path="a.b",
        custom_rm_path="c.py:d", session_id="s", non_generation_time=0.25, seed=2**40,
        teacher_top_ids=np.array([[7, 300_000], [1, 2]], np.int32),
        teacher_top_log_probs=np.array([[-0.5, -1], [-2, -3]], np.float32),
    )  # fmt: skip
    groups = [Group(5, [full, Sample()], epoch=2, row=9), Group(6, [])]
    dump = round_trip(tmp_path, groups)
    assert dump.groups == groups
    assert dump.rollout_id == 3
    assert type(dump.groups[0].samples[0].status) is Status
    assert dump.groups[0].samples[0].label == {"a": (1, 2)}
    for name in ("teacher_top_ids", "teacher_top_log_probs"):
        values = getattr(dump.groups[0].samples[0], name)
        np.testing.assert_array_equal(values, getattr(full, name), strict=True)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.builds(
            Sample,
            tokens=st.lists(st.integers(0, 2**40), max_size=4),
            loss_mask=st.none() | st.lists(st.integers(0, 1), max_size=4),
            rollout_log_probs=st.none() | st.lists(st.floats(allow_nan=False), max_size=4),
            reward=st.none() | st.floats(allow_nan=False),
            response=st.text(max_size=5),
            label=st.none() | st.text(max_size=3) | st.integers() | st.floats(allow_nan=False),
            metadata=st.dictionaries(
                st.text(max_size=3),
                st.recursive(
                    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
                    lambda inner: (
                        st.lists(inner, max_size=2)
                        | st.tuples(inner)
                        | st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=2)
                    ),
                    max_leaves=4,
                ),
                max_size=3,
            ),
        ),
        max_size=4,
    )
)
def test_any_plain_sample_is_restored(tmp_path_factory, samples):
    folder = tmp_path_factory.mktemp("dumps")
    assert round_trip(folder, [Group(0, samples)]).groups == [Group(0, samples)]


def test_any_file_name_works_and_torch_cannot_unpickle_anything_from_it(tmp_path):
    template = str(tmp_path / "rollouts" / "rollout_{rollout_id}.pt")
    dumps = RolloutDumps(template)
    groups = [Group(4, [Sample(group_index=4, index=8, tokens=[1, 2], response_length=1)])]
    dumps.save(7, groups)
    assert RolloutDumps.load(template, 7) == groups
    assert [p.name for p in (tmp_path / "rollouts").iterdir()] == ["rollout_7.pt"]


def test_evaluation_sets_share_one_file(tmp_path):
    dumps = RolloutDumps(str(tmp_path / "{rollout_id}.safetensors"))
    a = [Sample(group_index=0, response="x"), Sample(group_index=0), Sample(group_index=1)]
    dumps.save_evaluation(5, "aime", a)
    dumps.save_evaluation(5, "gsm", [Sample(group_index=0)])
    dumps.save_evaluation(6, "aime", a[:1])
    five = load_samples(tmp_path / "eval_5.safetensors")
    assert five.names == ["aime", "aime", "gsm"]
    assert [len(g) for g in five.groups] == [2, 1, 1]
    assert load_samples(tmp_path / "eval_6.safetensors").names == ["aime"]
    RolloutDumps(None).save(1, [])
    RolloutDumps(None).save_evaluation(1, "aime", a)


def test_only_the_newest_dumps_stay_and_each_is_bounded(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(rollout_dump, "MAX_TOKENS", 5)
    dumps = RolloutDumps(str(tmp_path / "{rollout_id}.safetensors"), newest=2)
    groups = [Group(i, [Sample(group_index=i, tokens=[1, 2], response_length=1)]) for i in range(4)]
    for rollout in range(8, 12):
        dumps.save(rollout, groups)
        dumps.save_evaluation(rollout, "aime", groups[0].samples)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"{kind}{number}.safetensors" for kind in ("", "eval_") for number in (10, 11)}
    assert load_samples(tmp_path / "11.safetensors").groups == groups[:2]
    dumps.save(12, [Group(0, [Sample(index=3, metadata={"image": np.zeros(3)})])] * 2)  # no error: nobody asked for it
    dumps.save(13, [Group(0, [Sample(index=3, metadata={"image": np.zeros(3)})])])
    assert len(caplog.records) == 1
    assert "--keep-samples 0" in caplog.text


def test_a_value_that_is_not_plain_data_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"sample 3, field metadata\['image'\] .* ndarray"):
        round_trip(tmp_path, [Group(0, [Sample(index=3, metadata={"image": np.zeros(3)})])])
    with pytest.raises(DataError, match=r"field label .* object"):
        round_trip(tmp_path, [Group(0, [Sample(label=object())])])
    with pytest.raises(DataError, match="per-token field rollout_log_probs"):
        round_trip(tmp_path, [Group(0, [Sample(rollout_log_probs=[None])])])  # type: ignore[list-item]
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_not_a_dump_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"none\.pt does not exist; write one with --save-debug-rollout-data"):
        load_samples(tmp_path / "none.pt")
    torch.save({"samples": []}, tmp_path / "slime.pt")
    with pytest.raises(DataError, match=r"torch\.save.* pickled"):
        load_samples(tmp_path / "slime.pt")
    from safetensors.numpy import save_file

    save_file({"x": np.zeros(1)}, tmp_path / "weights.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match="format 'pt'"):
        load_samples(tmp_path / "weights.safetensors")


def test_a_dump_of_another_rollout_is_an_error_that_names_both_numbers(tmp_path):
    dumps = RolloutDumps(str(tmp_path / "{rollout_id}.safetensors"))
    for number in (3, 4):
        dumps.save(number, [Group(number, [Sample()])])
    assert [group.index for group in dumps.load(str(dumps.template), 4)] == [4]
    path = tmp_path / "4.safetensors"
    shutil.copy(tmp_path / "3.safetensors", path)
    with pytest.raises(DataError, match=rf"{path} contains the dump of rollout 3, but .* of rollout 4"):
        dumps.load(str(dumps.template), 4)
    assert load_samples(path).rollout_id == 3  # a path of no rollout in particular

    dumps.save_evaluation(4, "aime", [Sample(group_index=0)])
    shutil.copy(tmp_path / "eval_4.safetensors", path)
    with pytest.raises(DataError, match=rf"{path} contains .* evaluation after rollout 4 \(aime\)"):
        dumps.load(str(dumps.template), 4)


def test_a_failed_write_leaves_only_the_previous_dump(tmp_path, monkeypatch):
    save_samples(tmp_path / "0", 0, [Group(1, [Sample()])])

    def fails(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dump, "save_file", fails)
    with pytest.raises(OSError, match="No space"):
        save_samples(tmp_path / "0", 0, [])
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    assert [group.index for group in load_samples(tmp_path / "0").groups] == [1]
