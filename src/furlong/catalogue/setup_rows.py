"""Before a run: model folders, flags and machines."""

from __future__ import annotations

from furlong.catalogue.row import MD, MQ, SD, SQ, ST, Row

ROWS = (
    Row(
        "CKPT01",
        "no complete checkpoint in a folder to load from",
        "PX",
        "error",
        symptom="Text is garbled from the first rollout, or a log says that no checkpoint was loaded.",
        cause="A trainer checkpoint has latest_checkpointed_iteration.txt; a Hugging Face model does not.",
        checked="--load and --ref-load contain a complete checkpoint, and latest_checkpointed_iteration.txt names it.",
        remedy="Use the folder that --save wrote, select a step with --ckpt-step, or start from a Hugging Face model "
        "with --hf-checkpoint.",
        guides=(MQ, MD, SQ, ST),
    ),
    Row(
        "CKPT02",
        "--ckpt-step names a missing step",
        "P",
        "error",
        symptom="The wrong iteration is loaded, or none.",
        cause="That step was not saved, or --keep-checkpoints removed it.",
        checked="The iter_* folders of --ckpt-step and --ref-ckpt-step exist and are complete.",
        remedy="Use the nearest existing step; the message lists them.",
        guides=(MQ, SQ),
    ),
    Row(
        "CKPT03",
        "engine and trainer have different weights",
        "PR",
        "error",
        symptom="The first rollout is garbled although the parameters were loaded.",
        cause="A tensor name is mapped to another layer (wrong offsets of pipeline stages), a tensor was quantized "
        "during the transfer, the engine released a buffer and did not restore it, the precision differs, or only one "
        "side ties the output layer to the embedding.",
        checked="Before the start, lm_head.weight against the embedding if config.json ties them. After the first "
        "weight update, checksums of tensors in the trainer against those in the engine: all tensors with "
        "--check-weight-update-equal, otherwise a sample.",
        remedy="The message names the first tensor that differs, with both shapes, dtypes and norms; use "
        "--check-weight-update-equal and --debug-weight-sync 1 to see all of them.",
        guides=(MD, SD),
    ),
    Row(
        "CKPT04",
        "incomplete model folder",
        "PX",
        "error",
        symptom="Loading fails with a missing shard, or parts of the model keep random values.",
        cause="A download was interrupted, or a conversion left files out.",
        checked="Every shard of model.safetensors.index.json exists and has the length that its header states, every "
        "tensor of the index is in its shard, every layer has tensors, layers of one kind have the same number, and "
        "shapes are those of config.json. The embedding has a row for every token of the tokenizer.",
        remedy="Download or convert the model again; `furlong check DIR` names the missing shard or layer.",
        guides=(SD,),
    ),
    Row(
        "CKPT05",
        "the checkpoint has another number of ranks",
        "P",
        "info",
        symptom="Parallel sizes differ from those of the save.",
        cause="The cluster or the parallel layout has changed; checkpoints are resharded when they are loaded.",
        checked="Parallel sizes in the checkpoint against those of this run.",
        remedy="No action is needed: the message shows the old and the new layout.",
        guides=(ST,),
    ),
    Row(
        "CKPT06",
        "state that a resumed run starts from",
        "P",
        "warning",
        symptom="It is unclear whether a run resumes where it ended: step, data, optimizer and random state.",
        cause="--load names a folder with a checkpoint.",
        checked="--load: the step, data position, optimizer and random state in the checkpoint.",
        remedy="To resume, set --load to the folder of --save. The message lists what will be restored; missing parts "
        "start from scratch.",
        guides=(MQ, SQ),
    ),
    Row(
        "CKPT07",
        "no model in --hf-checkpoint",
        "PX",
        "error",
        symptom="`transformers` cannot find a model, on one node or on some of several.",
        cause="The folder is missing or incomplete, or the model is not in the cache of this machine.",
        checked="--hf-checkpoint is a folder with config.json, weights and a readable tokenizer.",
        remedy="Pass a model folder or the name of a model on the Hub to --hf-checkpoint. On a cluster, share HF_HOME.",
        guides=(MQ, SQ),
    ),
    Row(
        "CKPT08",
        "a run would overwrite checkpoints",
        "P",
        "error",
        symptom="After a second start there are fewer checkpoints, or those of two runs in one folder.",
        cause="--save names a folder with checkpoints, and --load does not continue from it.",
        checked="The checkpoints in --save against the first rollout of this run.",
        remedy="Continue them with --load, or give each run its own --save folder.",
        guides=(),
    ),
    Row(
        "QNT01",
        "weights other than linear layers would be quantized",
        "P",
        "error",
        symptom="A router or an embedding of an INT4 model is all zeros.",
        cause="quantization_config.ignore does not cover them, and the engine skips quantized names that it does not "
        "have.",
        checked="quantization_config.ignore (FP8: modules_to_not_convert) against every two-dimensional weight: none "
        "that is stored unquantized may be missing in it, none that is stored quantized may be covered, and no router, "
        "embedding or output layer may be stored quantized.",
        remedy="Add the patterns that the message prints to quantization_config.ignore in config.json.",
        guides=(SD,),
    ),
    Row(
        "QNT02",
        "incomplete quantized checkpoint",
        "P",
        "error",
        symptom="A converted checkpoint lacks shards or layers.",
        cause="The conversion left something out, or was interrupted.",
        checked="The checks of CKPT04, and that every packed weight has its scales and shape.",
        remedy="Convert again; `furlong check DIR` names what is missing.",
        guides=(SD,),
    ),
    Row(
        "QNT03",
        "quantized weights to train from",
        "P",
        "error",
        symptom="Loading a model ends with an ImportError of a quantization library.",
        cause="The folder has weights in FP8 or INT4, and the trainer would start from them; or its format is one that "
        "furlong does not read, or that weight updates cannot be sent in (AWQ, GPTQ).",
        checked="quantization_config in the config.json of --hf-checkpoint, --load and --ref-load, and the names and "
        "dtypes of their tensors.",
        remedy="Give the trainer's weights in bfloat16 with --ref-load or --load, or train from the quantized values "
        "with --dequantize.",
    ),
    Row(
        "CFG01",
        "inconsistent batch sizes",
        "P",
        "error",
        symptom="Sizes are not divisible, or a rollout has more or fewer samples than its training steps use.",
        cause="rollout_batch_size x n_samples_per_prompt = global_batch_size x num_steps_per_rollout does not hold.",
        checked="That equation, and that micro-batches and data-parallel ranks divide the global batch.",
        remedy="Use one of the nearest valid settings; the message prints three, as flags to paste.",
        guides=(MQ, SQ, ST),
    ),
    Row(
        "CFG02",
        "unknown or ignored flag",
        "P",
        "error",
        symptom="A setting has no effect.",
        cause="The flag is misspelled, is a slime flag that furlong does not support, or requires another flag.",
        checked="Every flag and every key of a file is known, and has an effect with this backend and the other flags.",
        remedy="Use the name that the message suggests, add the required flag, or remove it.",
    ),
    Row(
        "CFG03",
        "asynchronous training with --colocate",
        "P",
        "error",
        symptom="An asynchronous run with --colocate fails or hangs.",
        cause="Colocated training and generation take turns on the same GPUs, so neither can run ahead of the other.",
        checked="--colocate together with --async-buffer-size or train_async.py.",
        remedy="Remove --colocate and give the engines their own GPUs with --rollout-num-gpus.",
        guides=(ST,),
    ),
    Row(
        "CFG04",
        "--max-tokens-per-gpu without --use-dynamic-batch-size",
        "P",
        "error",
        symptom="The token limit has no effect and memory runs out.",
        cause="--max-tokens-per-gpu only limits dynamic micro-batches.",
        checked="One of the two flags without the other.",
        remedy="Set both --use-dynamic-batch-size and --max-tokens-per-gpu; rollout_max_response_len / "
        "context_parallel_size is a safe start.",
        guides=(MQ,),
    ),
    Row(
        "CFG05",
        "missing or conflicting flags",
        "PX",
        "error",
        symptom="The command is rejected before it starts.",
        cause="A value is missing, out of range, or conflicts with another one.",
        checked="The type and range of every flag, and all rules between flags.",
        remedy="The message names the flags, their values, and what to change.",
    ),
    Row(
        "HOOK01",
        "a hook cannot be used",
        "PRX",
        "error",
        symptom="ImportError or AttributeError for a --*-path flag, or a generate function that generates no samples.",
        cause="The module cannot be imported, it does not define the function, or the function raises.",
        checked="Every --*-path flag is imported and its signature compared with the arguments that it gets; at each "
        "step, how many samples a generate function left without a response.",
        remedy="Write package.module.function or file.py:function. If the function raises, fix it at the line that the "
        "message shows.",
    ),
    Row(
        "HOOK02",
        "a hook blocks the event loop",
        "R",
        "warning",
        symptom="Rollouts with a custom generate function take many times longer, and the engine is idle.",
        cause="The function blocks without `await`: a synchronous HTTP request, `time.sleep`, a subprocess, or "
        "computation. All samples share one thread.",
        checked="Each rollout: the seconds that --custom-generate-function-path ran without awaiting, as a fraction of "
        "the rollout; and a line of user code that keeps the event loop from running for 10 s.",
        remedy="Use an asynchronous client for servers (httpx.AsyncClient instead of requests), "
        "`await asyncio.sleep` instead of time.sleep, and `await asyncio.to_thread(function, ...)` for the rest.",
    ),
    Row(
        "GPU01",
        "not enough GPUs in the cluster",
        "PX",
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
        remedy="End the other job, lower --actor-num-gpus-per-node or --rollout-num-gpus, or share GPUs with "
        "--colocate; --placement-timeout sets the deadline.",
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
        "PX",
        "error",
        symptom="The job hangs at submission, and Ray logs for minutes that it cannot connect to GCS.",
        cause="Nothing listens at --ray-address: Ray is not running there, or the address is wrong.",
        checked="A connection to --ray-address, if it is HOST:PORT; that Ray answers there, with the token of this "
        "process if it uses token authentication; and its version.",
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
        remedy="Find the process that grows (`ps aux --sort=-rss | head`) and limit what custom functions keep; save "
        "often (--save-interval), so that the run can resume with --load.",
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
        remedy="Check that process and machine: `top` for other load, `nvidia-smi -q -d PERFORMANCE` for GPU "
        "throttling, its CPU limit, and the number of threads in its log (--num-threads); exclude a machine that stays "
        "slow.",
    ),
    Row(
        "ENV01",
        "untested library versions",
        "PX",
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
