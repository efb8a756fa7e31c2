from __future__ import annotations

import itertools
import json
import math

import pytest

from furlong.errors import ConfigError
from furlong.evals.eval_records import EvalFile
from furlong.evals.eval_summary import mean_interval, pass_at_k, pass_interval, summarize, table


def record(task: int, sample: int, reward: float | None, outcome: str = "scored", **more: object) -> dict[str, object]:
    values = {"set": "s", "task": task, "sample": sample, "reward": reward, "outcome": outcome, "turns": 2}
    return {**values, "tokens": 10, "seconds": 1.0, **more}


def test_pass_at_k_is_the_share_of_subsets_with_a_pass():
    for rewards in ([1.0, 0.0, 0.5, 1.0], [0.0] * 4, [1.0] * 4):
        for k in (1, 2, 4):
            subsets = [*itertools.combinations(rewards, k)]
            expected = sum(max(subset) >= 1.0 for subset in subsets) / len(subsets)
            assert pass_at_k(rewards, k) == pytest.approx(expected)


def test_intervals_contain_the_mean_and_stay_in_range():
    for values in ([0.0] * 5, [1.0] * 5, [0.25, 0.5, 1.0, 0.0], [0.5, 0.5, 0.5]):
        estimate = pass_interval(values)
        assert 0.0 <= estimate.low <= estimate.value <= estimate.high <= 1.0
        assert estimate.low < estimate.high
    few, many = pass_interval([0.0, 1.0] * 4), pass_interval([0.0, 1.0] * 40)
    assert many.high - many.low < few.high - few.low
    assert pass_interval([0.4, 0.6] * 20).high < pass_interval([0.0, 1.0] * 20).high  # more samples of each task
    assert math.isnan(mean_interval([]).value)
    assert mean_interval([0.5]).low == 0.5


def test_failed_episodes_count_as_0_and_lost_servers_are_left_out():
    rows = [
        record(0, 0, 1.0, parts={"exact": 1.0, "note": "text"}),
        record(0, 1, None, "agent_error"),
        record(1, 0, 1.0, "policy_limit"),
        record(1, 1, None, "infra"),
    ]
    summary = summarize("s", rows)
    assert summary.reward.value == 0.75
    assert summary.pass_at.keys() == {1}
    assert summary.outcomes == {"scored": 1, "policy_limit": 1, "agent_error": 1, "infra": 1}
    assert summary.parts == {"exact": 1.0}
    text = table([summary, summarize("other", [record(0, i, 0.0) for i in range(3)])])
    assert "pass@2" in text
    assert "exact 1.000" in text
    assert json.dumps(summary.as_dict())
    assert summarize("none", []).tasks == 0


def test_a_killed_evaluation_continues_where_it_was(tmp_path):
    path, header = tmp_path / "evals" / "s.jsonl", {"samples": 2, "seed": 1}
    file = EvalFile(path, header, resume=False)
    assert not path.exists()
    for task, outcome in ((0, "scored"), (1, "infra"), (2, "scored")):
        file.append([record(task, i, 1.0, outcome) for i in range(2)])
    text = path.read_text()
    path.write_text(text[: text.rindex("\n", 0, -1) + 20])  # within the last line
    resumed = EvalFile(path, header, resume=True)
    assert resumed.done.keys() == {("s", 0)}  # a lost server and an incomplete task are evaluated again
    assert len(path.read_text().splitlines()) == 3
    with pytest.raises(ConfigError, match="exists"):
        EvalFile(path, header, resume=False)
    with pytest.raises(ConfigError, match="seed: 1, now 2"):
        EvalFile(path, {**header, "seed": 2}, resume=True)
    for wrong in ("not json\n", "[1]\n", '{"a": 1}\n'):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match=r"s\.jsonl"):
            EvalFile(path, header, resume=True)


def test_transcripts_with_any_text_and_an_interrupted_header_are_read_again(tmp_path):
    path, header = tmp_path / "s.jsonl", {"samples": 1}
    texts = ["\u2028 \x85 \x1c\n", "half a pair \ud83d", "日本"]
    EvalFile(path, header, resume=False).append([record(i, 0, 1.0, transcript=text) for i, text in enumerate(texts)])
    again = EvalFile(path, header, resume=True)
    assert [again.done["s", i][0]["transcript"] for i in range(3)] == texts
    for size in (1, 10):
        path.write_bytes(path.read_bytes()[:size])
        again = EvalFile(path, header, resume=True)
        assert not again.done
        again.append([record(0, 0, 1.0)])
        assert len(EvalFile(path, header, resume=True).done) == 1
