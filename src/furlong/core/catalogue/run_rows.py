"""Whole runs: asynchronous ones, hangs, kills, repetitions."""

from __future__ import annotations

from furlong.core.catalogue.row import MD, ST, Row

ROWS = (
    Row(
        "ASYNC01",
        "samples are older than wanted",
        "R",
        "warning",
        symptom="The policy diverges in an asynchronous run.",
        cause="Too many rollouts run ahead, or weights are published too rarely.",
        checked="Distribution of the age of the samples' policy version against its bound; within it, how far the "
        "policy moves from those that sampled what it is trained on.",
        remedy="Lower --async-buffer-size, or --update-weights-interval 1; a lower --lr, --use-tis.",
        guides=(ST,),
    ),
    Row(
        "ASYNC02",
        "the worker that generates ahead died",
        "R",
        "error",
        symptom="An asynchronous run waits for rollouts that never come.",
        cause="The worker's task or process ended.",
        checked="Liveness by progress: rollouts that were begun and make none.",
        remedy="Its error stands in the message; without one, see HANG01.",
        guides=(MD,),
    ),
    Row(
        "HANG01",
        "nothing happens any more",
        "R",
        "error",
        symptom="The run makes no progress and says nothing.",
        cause="One part waits for another that will not answer.",
        checked="No event for a time; then stacks of every process, lengths of queues, the last collective of each "
        "rank, and who waits for whom.",
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
        checked="events.jsonl has a start without an end, and no process holds the run's log.",
        remedy="Look for `Out of memory: Killed process` in dmesg and for the scheduler's message; the same command "
        "with --load goes on from the last checkpoint.",
    ),
    Row(
        "DET01",
        "two equal runs differ",
        "P",
        "warning",
        symptom="The same command gives other numbers.",
        cause="A seed, a number of threads or a kernel is not fixed.",
        checked="With --debug-determinism: that nothing in the flags or the environment lets two runs differ; each "
        "step's hashes are in the run's log.",
        remedy="Fix what the message names (--deterministic-mode for kernels); `furlong diff RUN_A RUN_B` shows the "
        "first step and value that differ.",
        guides=(MD,),
    ),
)
