from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from furlong.core.sample import Sample, Status
from furlong.errors import RewardError
from furlong.rewards.sandbox import Limits, Sandbox

FUNCTIONS = """
import asyncio, os, time

def length(args, sample, **kw):
    return float(len(sample.response))

def naughty(args, sample, **kw):
    if sample.response == "hang":
        while True:
            pass
    if sample.response == "sleep":
        time.sleep(60)
    if sample.response == "exit":
        os._exit(3)
    if sample.response == "sysexit":
        raise SystemExit("bye")
    if sample.response == "raise":
        raise KeyError("no such key")
    if sample.response == "eat":
        return len(bytearray(8 << 30))
    return 1.0

async def polite(args, sample, **kw):
    if sample.response == "hang":
        while True:
            pass
    if sample.response == "block":
        time.sleep(60)
    if sample.response == "exit":
        os._exit(3)
    await asyncio.sleep(60 if sample.response == "wait" else 0.005)
    return 1.0

arrived = 0

async def together(args, sample, **kw):
    global arrived
    arrived += 1
    while arrived < 64:
        await asyncio.sleep(0.001)
    return arrived

async def whole(args, samples, **kw):
    return [float(len(samples))] * len(samples)

def trl(prompts, completions, answer, **kw):
    return [None if a is None else float(c == a) for c, a in zip(completions, answer)]

def marks(args, sample, **kw):
    sample.metadata["seen"] = True
    sample.loss_mask = [0, 1]
    sample.status = sample.Status.TRUNCATED
    return 0.5

def options(args, sample, **kw):
    try:
        args.rm_type = "other"
    except AttributeError:
        return {"lr": args.lr, "missing": getattr(args, "no_such", 7), "pid": os.getpid()}

def pid(args, sample):
    return os.getpid()

def meeting(args, sample):
    open(os.path.join(sample.response, str(os.getpid())), "w").close()
    while len(os.listdir(sample.response)) < 2:
        time.sleep(0.005)
    return os.getpid()

def nothing():
    return 1.0
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    file = tmp_path_factory.mktemp("rewards") / "my_rewards.py"
    file.write_text(FUNCTIONS)
    return str(file)


@pytest.fixture(scope="module")
def sandbox(functions):
    sandboxes = {}

    def make(name, *, group=False, args=None, **limits):
        limits = {"timeout_s": 5.0, "num_workers": 1} | limits
        key = (name, group, str(args), str(limits))
        if key not in sandboxes:  # shared by the tests of this file, which saves starting processes
            sandboxes[key] = Sandbox(f"{functions}:{name}", limits=Limits(**limits), group=group, args=args)
        return sandboxes[key]

    yield make
    for each in sandboxes.values():
        each.close()


def samples_of(*responses):
    return [Sample(index=i, response=response) for i, response in enumerate(responses)]


def run(sandbox, *responses):
    return asyncio.run(sandbox.score(samples_of(*responses)))


@pytest.mark.nightly
def test_a_hanging_function_is_killed_and_the_next_call_works(sandbox):
    box = sandbox("naughty", timeout_s=0.3)
    run(box, "warm")
    started = time.monotonic()
    outcomes = run(box, "hang")
    assert time.monotonic() - started < 5  # 0.35 s on an idle machine
    assert outcomes[0].kind == "timed_out"
    assert "0.3 s" in outcomes[0].reason
    assert ".py:" in outcomes[0].reason  # where it was
    assert [o.kind for o in run(box, "sleep", "fine")] == ["timed_out", "scored"]


def test_a_crash_is_an_outcome_with_a_reason(sandbox):
    cases = [
        ("exit", "exit code 3"), ("sysexit", "SystemExit: bye"),
        ("raise", "KeyError: 'no such key'"),
    ]  # fmt: skip
    for response, reason in cases:
        outcomes = run(sandbox("naughty"), "fine", response, "fine")
        assert [o.kind for o in outcomes] == ["scored", "failed", "scored"]
        assert reason in outcomes[1].reason


def test_a_memory_limit_that_the_function_does_not_load_within(tmp_path):
    crash = "import os, resource\nif resource.getrlimit(resource.RLIMIT_AS)[0] > 0:\n    os.kill(os.getpid(), 11)\n"
    for name, code in [("raises", "import numpy\n"), ("crashes", crash)]:  # a library does either
        (tmp_path / f"{name}.py").write_text(f"{code}\n\ndef reward(args, sample):\n    return 1.0\n")
        small = Sandbox(f"{tmp_path}/{name}.py:reward", limits=Limits(memory_limit_bytes=int(0.05 * 2**30)))
        with pytest.raises(RewardError, match=r"within --reward-memory-limit 0\.05, without the limit it can"):
            run(small, "fine")


def test_a_memory_limit_is_an_outcome(sandbox):
    outcomes = run(sandbox("naughty", memory_limit_bytes=2 << 30), "eat", "fine")
    assert outcomes[0].reason.startswith("MemoryError")
    assert outcomes[1].reward == 1.0


def test_a_sample_without_a_json_form_is_a_failed_outcome(sandbox):
    [outcome] = asyncio.run(sandbox("naughty").score([Sample(response="fine", metadata={"tool": object()})]))
    assert outcome.kind == "failed"
    assert "object has no JSON form" in outcome.reason
    assert all(kind in outcome.reason for kind in ("numbers", "text", "lists", "dicts"))


def test_async_calls_of_one_worker_run_together(sandbox):
    outcomes = run(sandbox("together", concurrency=64), *["go"] * 64)  # each waits until all 64 have arrived
    assert [o.reward for o in outcomes] == [64.0] * 64


def test_an_async_timeout_does_not_affect_concurrent_calls(sandbox):
    outcomes = run(sandbox("polite", timeout_s=0.4), "wait", "go", "go")
    assert [o.kind for o in outcomes] == ["timed_out", "scored", "scored"]


@pytest.mark.parametrize("stuck", ["hang", "block"])
def test_an_async_call_that_blocks_its_worker_times_out_and_the_others_are_repeated(sandbox, stuck):
    box = sandbox("polite", timeout_s=0.4)
    run(box, "warm")
    started = time.monotonic()
    outcomes = run(box, "go", stuck, "go", "go")
    assert [o.kind for o in outcomes] == ["scored", "timed_out", "scored", "scored"]
    assert time.monotonic() - started < 10  # 0.9 s on an idle machine


def test_an_async_call_that_ends_its_worker_fails_alone(sandbox):
    outcomes = run(sandbox("polite", timeout_s=0.4), "go", "exit", "go")
    assert [o.kind for o in outcomes] == ["scored", "failed", "scored"]
    assert "exit code 3" in outcomes[1].reason


def test_batch_and_trl_functions_get_the_group(sandbox):
    assert [o.reward for o in run(sandbox("whole"), "a", "b", "c")] == [3.0] * 3
    samples = [
        Sample(prompt="p", response="4", label="x", metadata={"answer": "4"}),
        Sample(prompt="p", response="5", label="x", metadata={"answer": "4"}),
        Sample(prompt="p", response="5", label="x"),
    ]
    outcomes = asyncio.run(sandbox("trl").score(samples))
    assert [o.reward for o in outcomes] == [1.0, 0.0, None]
    assert "None" in outcomes[2].reason


def test_changes_of_a_sample_are_copied_back(sandbox):
    sample = Sample(tokens=[1, 2, 3], response_length=2, metadata={"old": 1}, status=Status.COMPLETED)
    asyncio.run(sandbox("marks").score([sample]))
    assert sample.metadata == {"old": 1, "seen": True}
    assert sample.loss_mask == [0, 1]
    assert sample.status is Status.TRUNCATED
    assert sample.tokens == [1, 2, 3]


def test_args_are_attributes_and_read_only(sandbox):
    reward = run(sandbox("options", args={"lr": 0.5, "rm_type": "math"}), "x")[0].reward
    assert isinstance(reward, dict)
    assert (reward["lr"], reward["missing"]) == (0.5, 7)


def test_a_config_view_is_sent_as_its_values(sandbox):
    from furlong.config.args_view import Args
    from furlong.config.sections import Config

    reward = run(sandbox("options", args=Args(Config())), "x")[0].reward
    assert isinstance(reward, dict)
    assert reward["lr"] == Config().optim.lr


def test_an_unusable_function_is_an_error_with_its_path(sandbox):
    cases = [
        ("no_such", "has no no_such"), ("nothing", r"must take \(response"), ("FUNCTIONS.x", "has no FUNCTIONS"),
    ]  # fmt: skip
    for name, reason in cases:
        with pytest.raises(RewardError, match=f"my_rewards.py:{name}.*{reason}"):
            run(sandbox(name), "x")


def test_a_failed_import_is_an_error_with_its_traceback(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("import no_such_package\n")
    box = Sandbox(f"{file}:reward")
    with pytest.raises(
        RewardError, match=r"(?s)broken.py:reward.*No module named 'no_such_package'.*import no_such_package"
    ):
        run(box, "x")
    box.close()


def test_a_start_timeout_is_an_error(tmp_path):
    file = tmp_path / "slow.py"
    file.write_text("import time\ntime.sleep(60)\n")
    box = Sandbox(f"{file}:reward", limits=Limits(start_timeout_s=0.5))
    with pytest.raises(RewardError, match=r"slow.py:reward did not start.*0\.5 s"):
        run(box, "x")
    box.close()


def test_the_same_sandbox_serves_several_event_loops(sandbox):
    box = sandbox("pid")
    assert run(box, "x")[0].reward == run(box, "x")[0].reward


def test_quick_calls_share_one_worker_and_closing_leaves_no_process(sandbox):
    box = sandbox("pid", num_workers=2)
    pids = {int(o.reward) for o in run(box, *["x"] * 8)}
    assert len(pids) == 1
    box.close()
    box.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_another_worker_is_started_when_calls_wait_long(sandbox, tmp_path):
    outcomes = run(sandbox("meeting", num_workers=2, timeout_s=30), str(tmp_path), str(tmp_path))
    assert len({o.reward for o in outcomes}) == 2  # a call ends only when two processes have arrived


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
@pytest.mark.nightly
def test_workers_end_when_the_driver_is_killed(functions):
    program = textwrap.dedent(f"""
        import asyncio
        from furlong.core.sample import Sample
        from furlong.rewards.sandbox import Limits, Sandbox
        box = Sandbox({functions + ":naughty"!r}, limits=Limits(num_workers=1, timeout_s=60))
        async def go():
            print(len(await box.score([Sample(response="fine")])), flush=True)
            await box.score([Sample(response="hang")])
        asyncio.run(go())
    """)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == b"1\n"
        workers = psutil.Process(driver.pid).children()
        assert len(workers) == 1
        os.kill(driver.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert not alive
