"""Machines: GPUs, ports, memory, libraries, threads, disks."""

from __future__ import annotations

from furlong.core.catalogue.row import MD, MQ, SD, SQ, ST, Row

ROWS = (
    Row(
        "GPU01",
        "not enough GPUs in the cluster",
        "P",
        "error",
        symptom="The job hangs at submission.",
        cause="Training and rollout together need more GPUs than the cluster has; often --colocate is missing.",
        checked="actor_num_nodes x actor_num_gpus_per_node, plus rollout_num_gpus without --colocate, against the GPUs "
        "of the Ray cluster or of this machine. Without Ray, engines may share the GPU of a single trainer if the "
        "weight transport is ipc or disk.",
        remedy="Add --colocate if the run then fits, or lower --actor-num-gpus-per-node or --rollout-num-gpus.",
        guides=(MQ, SQ),
    ),
    Row(
        "GPU02",
        "a placement group waits for GPUs",
        "RX",
        "error",
        symptom="The run hangs while its placement group is pending.",
        cause="Another job uses the GPUs, or no single node has as many as one bundle requests.",
        checked="After 30 s: the GPUs requested, the GPUs available, and the node that has too few.",
        remedy="End the other job, or request fewer GPUs per node; --placement-timeout sets the deadline.",
        guides=(MQ, SQ),
    ),
    Row(
        "GPU03",
        "a port is in use",
        "PX",
        "error",
        symptom="Servers on one node conflict; `Address already in use`.",
        cause="Another process listens on a port that a flag sets. Ports without a flag are chosen among free ones.",
        checked="Every port that a flag sets; if it is in use, the process that listens on it.",
        remedy="End that process, or choose another port.",
        guides=(MQ, SQ),
    ),
    Row(
        "GPU04",
        "a GPU is already in use",
        "PX",
        "error",
        symptom="Out of memory when an engine starts or in the first step, with flags that worked before.",
        cause="A process of an earlier run is still alive, or another job uses the GPU.",
        checked="Memory in use on the run's GPUs (CUDA_VISIBLE_DEVICES) above 2 GiB, and the processes that use it.",
        remedy="End that process, or select free GPUs with CUDA_VISIBLE_DEVICES.",
    ),
    Row(
        "GPU05",
        "the Ray cluster is unreachable",
        "P",
        "error",
        symptom="The job hangs at submission, and Ray logs for minutes that it cannot connect to GCS.",
        cause="Nothing listens at --ray-address: Ray is not running there, or the address is wrong.",
        checked="A connection to --ray-address, if it is HOST:PORT or ray://HOST:PORT.",
        remedy="Run `ray start` on that machine, or use the address that it printed; without --ray-address the run "
        "starts its own cluster on this machine.",
        guides=(MQ, SQ),
    ),
    Row(
        "MEM01",
        "the run will not fit into memory",
        "P",
        "error",
        symptom="Out of memory during training.",
        cause="Weights, gradients, optimizer states, activations, logits, caches and buffers exceed the device memory.",
        checked="The predicted peak of each phase against the device memory.",
        remedy="The message names the smallest change that fits: --max-tokens-per-gpu, --context-parallel-size, "
        "--recompute-activations, --offload-optimizer-states or --micro-batch-size; with --train-backend megatron also "
        "--tensor-model-parallel-size with --sequence-parallel.",
        guides=(MQ, SQ, ST),
    ),
    Row(
        "MEM02",
        "out of memory",
        "X",
        "error",
        symptom="CUDA out of memory, or `can't allocate memory` on a CPU.",
        cause="A phase needed more than was free; often one sample is much longer than the others.",
        checked="The phase, in the trainer or an engine; the longest sample, total memory, memory used by the run, the "
        "prediction for its micro-batch, and the largest live tensors.",
        remedy="The message names the smallest change that fits: --max-tokens-per-gpu, --recompute-activations, "
        "--offload-optimizer-states, --context-parallel-size; for an engine --sglang-mem-fraction-static, "
        "--sglang-cuda-graph-max-bs or --sglang-max-running-requests.",
        guides=(MQ, SQ, ST),
    ),
    Row(
        "MEM03",
        "colocated engine and trainer do not release enough memory",
        "RX",
        "error",
        symptom="Out of memory at the second step of a colocated run.",
        cause="An engine retains workspaces, buffers and CUDA graphs after it released weights and KV cache, or a "
        "trainer retains tensors while the engine generates.",
        checked="Each step: the memory an engine retains after releasing everything, next to the trainer's peak; the "
        "memory an offloaded trainer retains; and whether either grows.",
        remedy="In training: lower --sglang-max-running-requests or --max-tokens-per-gpu. In generation: lower "
        "--sglang-mem-fraction-static to 0.7, then 0.6, then 0.4. In either: --offload-optimizer-states, shorter "
        "samples.",
        guides=(MD, SD, ST),
    ),
    Row(
        "MEM04",
        "host memory fills up",
        "R",
        "warning",
        symptom="After hours a worker or an engine is killed, and no log explains it.",
        cause="A process leaks memory from step to step: a cache in a custom function, open files, results that are "
        "never fetched.",
        checked="The fraction of the machine's or container's memory in use (perf/host_memory_frac) over 32 steps: "
        "growth of a tenth that would fill it within three times as many steps.",
        remedy="Find the process that grows and limit what it retains; until then save often with --save-interval.",
    ),
    Row(
        "RANK01",
        "a rank is slower than the others",
        "R",
        "warning",
        symptom="Every step takes longer than it should on all machines, and nothing fails.",
        cause="Its machine or GPU is slow: another process uses it, heat or a power limit throttles it, or it gets "
        "less CPU time. Ranks wait for each other in every layer, so the slowest one sets the speed.",
        checked="The forward time of each rank's own layers, against ranks of the same pipeline stage and for the same "
        "work: 1.5 times in 7 of 8 rollouts, and 5 % of the step time.",
        remedy="Check the process and the machine that the message names; exclude the machine if it stays slow.",
    ),
    Row(
        "ENV01",
        "untested library versions",
        "P",
        "warning",
        symptom="Import errors, missing arguments, or silent changes after an upgrade.",
        cause="An installed version is outside the range that furlong is tested with.",
        checked="Installed versions of torch, transformers, sglang, ray and megatron-core against the tested ranges.",
        remedy="Run the pip command in the message.",
    ),
    Row(
        "ENV02",
        "too many CPU threads",
        "P",
        "warning",
        symptom="A run on a CPU is ten times slower than it should be.",
        cause="More threads run than the container has CPUs, and they wait for each other.",
        checked="The number of threads against usable cores, the cgroup quota and the load.",
        remedy="Remove --num-threads, or set it to the number in the message.",
    ),
    Row(
        "DISK01",
        "checkpoints do not fit on the disk",
        "PX",
        "error",
        symptom="The disk fills up during a save.",
        cause="The disk has less space than the checkpoints of this run need, or another process fills it.",
        checked="Free space against the predicted checkpoint size times the number of checkpoints kept; after a "
        "failure, the system's error for the write.",
        remedy="Use --save on another disk, --keep-checkpoints, or a larger --save-interval.",
    ),
    Row(
        "CHECK01",
        "a check of the doctor failed",
        "PRX",
        "warning",
        symptom="The doctor reports that one of its checks failed.",
        cause="The check hit a case that it does not handle: a bug in furlong, or a modified file.",
        checked="Every check, for exceptions that it does not handle.",
        remedy="The run is not blocked; please report the traceback in the message.",
    ),
)
