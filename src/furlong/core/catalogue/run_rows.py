"""Whole runs: asynchronous training, hangs, kills, reproducibility."""

from __future__ import annotations

from furlong.core.catalogue.row import MD, ST, Row

ROWS = (
    Row(
        "ASYNC01",
        "stale samples",
        "R",
        "warning",
        symptom="The policy diverges in an asynchronous run.",
        cause="Too many rollouts run ahead, or weights are updated too rarely.",
        checked="The distribution of the samples' staleness against its bound; within the bound, how far the policy "
        "moves from the versions that sampled its training data.",
        remedy="Lower --async-buffer-size or set --update-weights-interval 1; lower --lr; --use-tis.",
        guides=(ST,),
    ),
    Row(
        "ASYNC02",
        "the asynchronous rollout worker died",
        "R",
        "error",
        symptom="An asynchronous run waits for rollouts that never arrive.",
        cause="The worker's task or process ended.",
        checked="Progress of the rollouts that were started.",
        remedy="The message has the worker's error; without one, see HANG01.",
        guides=(MD,),
    ),
    Row(
        "HANG01",
        "the run hangs",
        "R",
        "error",
        symptom="The run makes no progress and logs nothing.",
        cause="One part waits for another that never answers.",
        checked="No event for some time; then the stacks of every process, queue lengths, the last collective of "
        "each rank, and which part waits for which.",
        remedy="The message names the probable cause from this list.",
        guides=(MD,),
    ),
    Row(
        "KILL01",
        "the run was killed",
        "X",
        "error",
        symptom="The run's process is gone and its log ends without an error.",
        cause="Something outside ended it: the machine's out-of-memory killer, a scheduler's limit, or a person.",
        checked="events.jsonl has a start without an end, and no process has the run's log open.",
        remedy="Look for `Out of memory: Killed process` in dmesg and for the scheduler's message; the same command "
        "with --load resumes from the last checkpoint.",
    ),
    Row(
        "DET01",
        "two identical runs differ",
        "P",
        "warning",
        symptom="The same command gives different numbers.",
        cause="A seed, a number of threads or a kernel is not fixed.",
        checked="With --debug-determinism: flags and environment variables that allow two runs to differ; the hashes "
        "of each step are in the run's log.",
        remedy="Fix what the message names (--deterministic-mode for kernels); `furlong diff RUN_A RUN_B` shows the "
        "first step and value that differ.",
        guides=(MD,),
    ),
)
