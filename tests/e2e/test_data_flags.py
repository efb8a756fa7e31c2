"""Where prompts come from: files, slices, formats, epochs."""

from __future__ import annotations

import json

import pytest

from furlong.data.audit import audit
from furlong.errors import ConfigError, DataError
from runs import differences, flags, ledger_events, reproducible, rows, train, write_prompts


def issued(folder):
    return [(e["ep"], e["row"]) for e in ledger_events(folder) if e["e"] == "issued"]


def test_epochs_give_the_number_of_rollouts_and_every_row_once_each(model, tmp_path):
    data = write_prompts(tmp_path / "prompts.jsonl", 12)
    argv = flags(model, data, tmp_path / "run", num_rollout=None, num_epoch=2, rollout_shuffle=True)
    assert train(argv) == 6
    assert sorted(issued(tmp_path / "run")) == [(epoch, row) for epoch in (0, 1) for row in range(12)]
    assert audit(tmp_path / "run" / "ledger.jsonl", finished=True).num_trained == 24


def test_data_that_ends_early_ends_the_run_with_a_report(model, tmp_path):
    data = write_prompts(tmp_path / "prompts.jsonl", 10)
    argv = flags(model, data, tmp_path / "run", num_rollout=9, num_epoch=1, save=tmp_path / "save")
    assert train(argv) == 2
    log = (tmp_path / "run" / "run.log").read_text()
    assert "the data ended with 2 of 4 groups" in log
    assert "the data ended after 2 of 9 rollouts" in log
    assert "the run ended after step 2, in " in log
    assert "--save-hf" not in log
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text() == "2\n"
    result = audit(tmp_path / "run" / "ledger.jsonl", finished=True)
    assert result.ok
    assert dict(result.drop_reasons) == {"end_of_data": 2}


@pytest.mark.parametrize("changes", [{}, {"rollout_shuffle": True}])
def test_streamed_file_gives_the_same_run(changes, model, tmp_path):
    data = write_prompts(tmp_path / "prompts.jsonl", 10)

    def run(name, **more):
        train(flags(model, data, tmp_path / name, num_rollout=4, **changes, **more))
        return [reproducible(row) for row in rows(tmp_path / name)]

    whole = run("whole")
    streamed = run("streamed", streaming_data=True, num_data_workers=2)
    if changes:
        assert {row for _, row in issued(tmp_path / "streamed")} == {row for _, row in issued(tmp_path / "whole")}
    else:
        assert differences(streamed, whole) == []


def test_data_that_ends_before_a_rollout_is_full_is_an_error(model, tmp_path):
    data = write_prompts(tmp_path / "prompts.jsonl", 3)
    with pytest.raises(DataError, match="first of 9 rollouts"):
        train(flags(model, data, tmp_path / "run", num_rollout=9, num_epoch=1))


def test_wrong_column_is_an_error_that_names_the_right_one(model, tmp_path):
    data = write_prompts(tmp_path / "prompts.jsonl", 4)
    with pytest.raises(ConfigError, match=r"the closest is 'label' \(--label-key label\)"):
        train(flags(model, data, tmp_path / "run", label_key="labels"))


def test_bad_rows_are_an_error_unless_they_are_to_be_skipped(model, tmp_path):
    data = write_prompts(tmp_path / "prompts.jsonl", 6)
    data.write_text(data.read_text() + "{broken\n")
    with pytest.raises(ConfigError, match="not JSON"):
        train(flags(model, data, tmp_path / "run"))
    evaluated = {"eval_prompt_data": ["own", data], "eval_interval": 1}
    assert train(flags(model, data, tmp_path / "skipped", skip_bad_rows=True, num_rollout=1, **evaluated)) == 1
    assert "eval/own" in rows(tmp_path / "skipped")[-1]


def test_prompts_that_leave_no_room_in_the_context_are_dropped_and_counted(model, tmp_path, caplog):
    long = [{"prompt": "1" * 60, "label": "1"}]
    short = [{"prompt": f"{n}+1=", "label": "1"} for n in range(7)]
    for name, listed in (("train", [*short, *long]), ("eval", [*long, *short[:2]])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in listed))
    argv = flags(
        model, tmp_path / "train.jsonl", tmp_path / "run", num_rollout=3, rollout_max_context_len=40,
        eval_prompt_data=["held", tmp_path / "eval.jsonl"], eval_interval=3, rm_type="random", input_key="prompt",
    )  # fmt: skip
    assert train(argv) == 3
    shown = rows(tmp_path / "run")
    assert [row["rollout/dropped_long_prompts"] for row in shown if row["step"]] == [1, 1, 1]
    texts = [record.getMessage() for record in caplog.records if "dropped 1 of" in record.getMessage()]
    assert [text.partition(".jsonl: ")[2] for text in texts] == [
        "dropped 1 of 8 prompts longer than 39 tokens (--rollout-max-context-len)",
        "dropped 1 of 3 prompts longer than 39 tokens (--eval-max-context-len)",
    ]
