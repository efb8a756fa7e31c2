"""Contract of `ports.Reward`, run over all implementations."""

from __future__ import annotations

import asyncio

import pytest

from furlong.core.outcome import Outcome
from furlong.core.sample import Sample, Status
from furlong.interfaces import Reward
from furlong.rewards.group_reward import GroupReward

FUNCTIONS = """
def single(args, sample, **kw):
    if sample.response == "bad":
        raise ValueError("bad response")
    return float(sample.response == sample.label)

async def batch(args, samples, **kw):
    if any(s.response == "bad" for s in samples):
        raise ValueError("bad response")
    return [single(args, s) for s in samples]

def trl(completions, label, **kw):
    if "bad" in completions:
        raise ValueError("bad response")
    return [float(c == x) for c, x in zip(completions, label)]
"""

KINDS = {
    "f1": {"rm_type": "f1"},
    "math": {"rm_type": "math"},
    "gpqa": {"rm_type": "gpqa"},
    "dapo": {"rm_type": "dapo"},
    "random": {"rm_type": "random"},
    "sandboxed single": {"name": "single"},
    "sandboxed batch": {"name": "batch", "group_rm": True},
    "sandboxed trl": {"name": "trl"},
    "in-process single": {"name": "single", "in_process": True},
    "in-process batch": {"name": "batch", "group_rm": True, "in_process": True},
    "in-process trl": {"name": "trl", "in_process": True},
}


@pytest.fixture(params=list(KINDS))
def options(request, tmp_path):
    chosen = dict(KINDS[request.param])
    if name := chosen.pop("name", None):
        (tmp_path / "rewards.py").write_text(FUNCTIONS)
        chosen["custom_rm"] = f"{tmp_path}/rewards.py:{name}"
    return chosen


def scored(options, *groups):
    async def go():
        implementation = GroupReward(num_workers=1, timeout_s=20, **options)
        reward: Reward = implementation
        try:
            return [await reward(group) for group in groups]
        finally:
            await implementation.close()

    return asyncio.run(go())


def a_sample(response="B", **fields):
    return Sample(response=response, label="B", status=Status.COMPLETED, **fields)


def test_there_is_one_outcome_per_sample_in_order(options):
    sizes = (1, 3, 0)
    answers = scored(options, *([a_sample(index=i, seed=i) for i in range(n)] for n in sizes))
    assert [len(answer) for answer in answers] == list(sizes)
    assert all(isinstance(o, Outcome) and o.kind == "scored" for answer in answers for o in answer)


def test_aborted_samples_are_not_scored(options):
    aborted = a_sample()
    aborted.status = Status.ABORTED
    (answer,) = scored(options, [a_sample(), aborted, a_sample()])
    assert [o.kind for o in answer] == ["scored", "failed", "scored"]
    assert answer[1].reward is None


def test_a_fanned_out_group_has_one_outcome_per_sample(options):
    fanned = [a_sample(rollout_id=1), a_sample(rollout_id=1), a_sample(rollout_id=2)]
    (answer,) = scored(options, fanned)
    assert [o.kind for o in answer] == ["scored"] * 3


def test_an_exception_of_the_scorer_is_an_outcome(options):
    broken = a_sample("bad") if "custom_rm" in options else Sample(response="B", label=None, seed=1)
    (answer,) = scored(options, [broken])
    if options.get("rm_type") != "random":
        assert answer[0].kind == "failed"
        assert answer[0].reward is None
        assert "bad response" in answer[0].reason or "label" in answer[0].reason


def test_samples_are_not_scored_in_place(options):
    samples = [a_sample(), a_sample()]
    before = [s.to_dict() for s in samples]
    scored(options, samples)
    assert [s.to_dict() for s in samples] == before
