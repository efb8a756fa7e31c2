"""Machines: GPUs, ports, memory, libraries, threads, disks."""

from __future__ import annotations

from furlong.core.catalogue.row import MD, MQ, SD, SQ, ST, Row

ROWS = (
    Row(
        "GPU01",
        "the cluster has fewer GPUs than the run needs",
        "P",
        "error",
        symptom="The job hangs at submission.",
        cause="The sum of training and rollout GPUs is above what the cluster has; often --colocate is forgotten.",
        checked="With --colocate actor_num_nodes x actor_num_gpus_per_node, without it that + rollout_num_gpus, "
        "against the GPUs of the Ray cluster or of this machine. Engines may share the GPU of one trainer without Ray "
        "if weights go by ipc or disk.",
        remedy="Add --colocate if it would fit, or lower --actor-num-gpus-per-node or --rollout-num-gpus.",
        guides=(MQ, SQ),
    ),
    Row(
        "GPU02",
        "a placement group waits for GPUs",
        "RX",
        "error",
        symptom="The run stands still while its placement group is pending.",
        cause="Another job holds the GPUs, or no single node has as many as one bundle asks for.",
        checked="After 30 s: what is asked, what is free, and which node lacks it.",
        remedy="End the other job, or ask for fewer GPUs per node; --placement-timeout sets the deadline.",
        guides=(MQ, SQ),
    ),
    Row(
        "GPU03",
        "a port is taken",
        "PX",
        "error",
        symptom="Servers collide on one node; `Address already in use`.",
        cause="Another process listens on a port that a flag fixes; ports that no flag fixes are found free.",
        checked="Every fixed port is free; for a taken one, the process that holds it.",
        remedy="End that process, or give another port.",
        guides=(MQ, SQ),
    ),
    Row(
        "GPU04",
        "a GPU is in use already",
        "PX",
        "error",
        symptom="Out of memory at the start of an engine or in the first step, with flags that worked before.",
        cause="A process of an earlier run lives on, or another job has the GPU.",
        checked="Memory that is in use on the run's GPUs (CUDA_VISIBLE_DEVICES), and by which processes, above 2 GiB.",
        remedy="End that process, or name free GPUs with CUDA_VISIBLE_DEVICES.",
    ),
    Row(
        "GPU05",
        "the Ray cluster cannot be reached",
        "P",
        "error",
        symptom="The job hangs at submission, and Ray says for minutes that it cannot connect to GCS.",
        cause="Nothing listens at --ray-address: Ray is not started there, or the address is another one.",
        checked="A connection to --ray-address, where that is HOST:PORT or ray://HOST:PORT.",
        remedy="`ray start` on that machine, or the address that it printed; without --ray-address the run "
        "starts a cluster of its own on this machine.",
        guides=(MQ, SQ),
    ),
    Row(
        "MEM01",
        "the run will not fit into memory",
        "P",
        "error",
        symptom="Out of memory in training.",
        cause="Weights, gradients, optimizer states, activations, logits, caches and buffers exceed the device.",
        checked="The predicted peak of each phase against the device's memory.",
        remedy="The message names the smallest change that fits: --max-tokens-per-gpu, --context-parallel-size, "
        "--recompute-activations, --offload-optimizer-states or --micro-batch-size; with --train-backend megatron "
        "--tensor-model-parallel-size with --sequence-parallel.",
        guides=(MQ, SQ, ST),
    ),
    Row(
        "MEM02",
        "memory ran out",
        "X",
        "error",
        symptom="CUDA out of memory, or `can't allocate memory` on a CPU.",
        cause="A phase needed more than was free; often one sample is much longer than the others.",
        checked="The phase, of the trainer or of an engine; the longest sample, what there is, what the run had of it, "
        "what was predicted of its micro-batch, the largest live tensors.",
        remedy="The message names the smallest change that fits: --max-tokens-per-gpu, --recompute-activations, "
        "--offload-optimizer-states, --context-parallel-size; for an engine --sglang-mem-fraction-static, "
        "--sglang-cuda-graph-max-bs or --sglang-max-running-requests.",
        guides=(MQ, SQ, ST),
    ),
    Row(
        "MEM03",
        "engine and trainer do not make room for each other",
        "RX",
        "error",
        symptom="Out of memory at the second step of a colocated run.",
        cause="An engine keeps workspaces, buffers and CUDA graphs where it releases weights and cache, or a trainer "
        "keeps tensors while the engine generates.",
        checked="Each step: what the engine keeps once it has released all, beside the trainer's peak; what a sleeping "
        "trainer keeps; and whether either grows.",
        remedy="In training: lower --sglang-max-running-requests or --max-tokens-per-gpu. In generation: lower "
        "--sglang-mem-fraction-static to 0.7, then 0.6, then 0.4. In either: --offload-optimizer-states, shorter "
        "samples.",
        guides=(MD, SD, ST),
    ),
    Row(
        "MEM04",
        "the machine's memory fills up",
        "R",
        "warning",
        symptom="After hours a worker or an engine is killed, and no log says why.",
        cause="A process keeps what it should let go of from step to step: a cache of a custom function, open files, "
        "results that nobody fetches.",
        checked="The share of the machine's or the container's memory in use (perf/host_memory_frac) over 32 steps: "
        "growth of a tenth, that would fill it within three times as many.",
        remedy="Find the process that grows, and bound what it keeps; save often with --save-interval meanwhile.",
    ),
    Row(
        "RANK01",
        "a rank is slower than the others",
        "R",
        "warning",
        symptom="Every step takes longer than it should, on all machines, and nothing fails.",
        cause="Its machine or GPU is slow: another process uses it, heat or a power limit slows it, or it has less "
        "CPU time. Ranks wait for each other in every layer, so the slowest one sets the pace.",
        checked="Seconds that each rank's own layers take in forward passes, against the ranks of the same pipeline "
        "stage and for the same work: 1.5 times in 7 of 8 rollouts, and 5 % of the time.",
        remedy="Look at the process and the machine that the message names; leave it out if it stays slow.",
    ),
    Row(
        "ENV01",
        "library versions that were not tested together",
        "P",
        "warning",
        symptom="Import errors, missing arguments, or silent changes after an upgrade.",
        cause="An installed version is outside the range that furlong is tested with.",
        checked="Installed versions of torch, transformers, sglang, ray and megatron-core against the tested ranges.",
        remedy="Run the pip command in the message.",
    ),
    Row(
        "ENV02",
        "threads do not fit the processor",
        "P",
        "warning",
        symptom="A run on a CPU is ten times slower than it should be.",
        cause="More threads than the container may use wait for each other.",
        checked="Threads against usable cores, the cgroup's quota and the load.",
        remedy="Leave --num-threads out, or set it to the number in the message.",
    ),
    Row(
        "DISK01",
        "checkpoints do not fit on the disk",
        "PX",
        "error",
        symptom="The disk is full during a save.",
        cause="The folder's disk has less room than the checkpoints of this run take, or somebody else fills it.",
        checked="Free space against the predicted size of a checkpoint times the number kept; afterwards, what the "
        "system said of a write.",
        remedy="Use --save on another disk, --keep-checkpoints, or a larger --save-interval.",
    ),
    Row(
        "CHECK01",
        "a check of the doctor failed itself",
        "PRX",
        "warning",
        symptom="The doctor says that one of its checks could not be done.",
        cause="The check met something that it does not expect; this is a bug of furlong, or a file that changed.",
        checked="Every check, for exceptions that it does not handle.",
        remedy="The run is not blocked by it; report the traceback in the message.",
    ),
)
