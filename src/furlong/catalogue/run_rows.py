"""During a run: engines, weight updates, hangs, kills and reproducibility."""

from __future__ import annotations

from furlong.catalogue.row import MD, MQ, SD, SQ, ST, Row

ROWS = (
    Row(
        "ENG01",
        "illegal memory access in an engine",
        "X",
        "error",
        symptom="`an illegal memory access was encountered` in an engine's log.",
        cause="Usually a hidden out-of-memory; otherwise padding of CUDA graphs, or speculative decoding.",
        checked="The engine's log.",
        remedy="Try in this order: lower --sglang-mem-fraction-static or --sglang-server-concurrency; "
        "set CUDA_LAUNCH_BLOCKING=1 in the environment; "
        "--sglang-disable-cuda-graph; turn off speculative decoding; turn off DeepEP; take a GPU core dump "
        "(CUDA_ENABLE_COREDUMP_ON_EXCEPTION=1), which names the kernel.",
        guides=(MQ, MD, SQ, SD),
    ),
    Row(
        "ENG02",
        "corrupt compiler cache",
        "X",
        "error",
        symptom="`JSONDecodeError` from torch inductor.",
        cause="Several processes wrote the compile cache at the same time, or one was killed while writing.",
        checked="The traceback.",
        remedy="Set TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 in the environment of the run, or delete the cache folder in "
        "the traceback.",
        guides=(MQ, MD, SQ),
    ),
    Row(
        "ENG03",
        "an engine died",
        "RX",
        "error",
        symptom="Connection errors during generation; an engine process is gone.",
        cause="It ran out of memory or a kernel failed; the end of its log shows which.",
        checked="Process exits and failed health checks.",
        remedy="Restart engines with --use-fault-tolerance (a trainer rank is not restarted: resume with --load). "
        "Lower --sglang-mem-fraction-static (or raise it, if the "
        "engine's log says that the KV cache is too small) or --rollout-batch-size; use "
        "--sglang-disable-cuda-graph to find the cause.",
        guides=(ST,),
    ),
    Row(
        "ENG04",
        "engines are loaded unevenly",
        "R",
        "warning",
        symptom="Some engines are busy while others are idle.",
        cause="The router sends requests with the same prefix to the same engine.",
        checked="Running requests per engine over a window: the maximum against the mean.",
        remedy="Use --sglang-router-strategy round_robin, or more engines with a smaller "
        "--rollout-num-gpus-per-engine.",
        guides=(ST,),
    ),
    Row(
        "ENG05",
        "an engine is unreachable",
        "PX",
        "error",
        symptom="`Max retries exceeded with url: /get_model_info`.",
        cause="The engine is still starting, it died, or another process uses its port.",
        checked="The answer and the settings of each of --rollout-external-engine-addrs, of the router and of teachers "
        "on servers; after a failure the traceback, the process, and which process listens on the port.",
        remedy="The message says which of the three; see GPU03 for a port in use. Fewer engines per machine, with a "
        "larger --rollout-num-gpus-per-engine, need fewer ports.",
        guides=(MQ, SQ),
    ),
    Row(
        "ENG06",
        "an engine accepts requests but does not answer",
        "R",
        "warning",
        symptom="The run hangs in a rollout or a weight update; all processes are alive and no log advances.",
        cause="The engine process is stopped, someone else put the engine to sleep, or one of its kernels or "
        "collectives hangs.",
        checked="An engine that has not answered for 30 s gets a health request (/health_generate, or /health while it "
        "loads weights), which may take another 30 s.",
        remedy="Read the end of its log under logs/ and inspect its process (`ps`: state T means stopped, `kill -CONT` "
        "resumes it; `py-spy dump` shows where it is). A sleeping engine needs /resume_memory_occupation and "
        "/continue_generation. The run waits until --sglang-router-request-timeout-secs; --use-fault-tolerance "
        "restarts such an engine.",
    ),
    Row(
        "SYNC01",
        "a weight update hangs",
        "RX",
        "error",
        symptom="Training hangs after a rollout, or the weight update times out.",
        cause="A rank does not take part, or the transport (network, file system, loading engine) is misconfigured or "
        "slow.",
        checked="A deadline for each bucket; when it expires, the engines that have not answered, the bucket and the "
        "transport.",
        remedy="Raise the limit that expired: --update-weight-timeout for an engine, --distributed-timeout-minutes for "
        "a collective of the trainer's ranks. NCCL: set NCCL_SOCKET_IFNAME=IFACE, NCCL_DEBUG=INFO in the environment; "
        "with InfiniBand check `ibstat` and set NCCL_IB_DISABLE=0. gloo: set GLOO_SOCKET_IFNAME=IFACE. Disk: use a "
        "faster file system. Or use a larger --update-weights-interval, or --colocate.",
        guides=(MD, ST),
    ),
    Row(
        "SYNC02",
        "a parameter never arrives in the engine",
        "R",
        "error",
        symptom="A parameter is all zeros in the engine, or never changes during training.",
        cause="It was quantized under a name that the engine skips (QNT01), or it is frozen.",
        checked="After each weight update: tensors that are all zeros, and tensors whose checksum never changes.",
        remedy="Add it to quantization_config.ignore in config.json; check --freeze-params-name-list.",
        guides=(SD,),
    ),
    Row(
        "SYNC03",
        "the engine computes with stale weights",
        "P",
        "warning",
        symptom="Log-probs of engine and trainer drift apart during a run, although every weight update is verified.",
        cause="SGLang 0.5.16 copies the routers of GLM-4-MoE models to float32 at the first forward pass and does not "
        "refresh the copy when weights are updated.",
        checked="config.json of --hf-checkpoint, --engine sglang, and the set of trained parameters.",
        remedy="Freeze them with --freeze-params-name-list 'mlp\\.gate\\.weight', or use an SGLang that resets "
        "`_weight_fp32` when it loads weights.",
    ),
    Row(
        "SYNC04",
        "the engine does not tie the LM head",
        "P",
        "error",
        symptom="The engine gives every token the same probability, or its log-probs are those of an untrained model.",
        cause="SGLang 0.5.16 respects tie_word_embeddings only for dense and DeepSeek models; for GLM-4-MoE, gpt-oss, "
        "Qwen2-MoE and Qwen3-MoE it always allocates an LM head, which stays uninitialized if the files have none.",
        checked="config.json of --hf-checkpoint and --engine sglang; for external servers their model family, at the "
        "first weight update.",
        remedy="In the model's config.json set tie_word_embeddings to false and copy the embedding, "
        "model.embed_tokens.weight, to lm_head.weight; or use --engine embedded.",
    ),
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
        remedy="Fix what it raised (the traceback is in run.log). A worker of a --rollout-function-path must pass its "
        "errors on to the function that waits for it.",
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
        remedy="The message has what each part does, and the file with all stacks.",
        guides=(MD,),
    ),
    Row(
        "SLOW01",
        "generation became slow",
        "R",
        "warning",
        symptom="Steps take several times as long as before.",
        cause="Candidates: an engine that shares its GPU or CPU with another process or is throttled, or a tool, "
        "sandbox or server that responses wait for.",
        checked="Time of a rollout without waiting for rewards, tokens per second, and those of the longest sample, in "
        "three steps, against the median of the earlier ones.",
        remedy="Look at `nvidia-smi` and the engine's log; perf/non_generation_time and the log of the tools show what "
        "functions wait for; `py-spy dump` of the run's process shows what it does now.",
    ),
    Row(
        "LIMIT01",
        "a limit of the system is reached",
        "X",
        "error",
        symptom="Too many open files, or no further thread or process.",
        cause="A limit of the account, the shell or the container is too small.",
        checked="The error that ended the run.",
        remedy="Raise the limit that the message names (`ulimit -a`; in containers --ulimit and --pids-limit).",
    ),
    Row(
        "GPU06",
        "a GPU or its driver fails",
        "X",
        "error",
        symptom="Xid in dmesg, an uncorrectable ECC error, or a GPU that fell off the bus.",
        cause="The hardware is defective or too hot, or the driver needs a restart.",
        checked="The error that ended the run, and the logs of its processes.",
        remedy="Look at `nvidia-smi -q` and `dmesg` on that machine, exclude it, and resume with --load.",
    ),
    Row(
        "KILL01",
        "the run was killed",
        "X",
        "error",
        symptom="The run's process is gone and its log ends without an error.",
        cause="Something outside ended it (the machine's out-of-memory killer, a scheduler's limit, a person), or "
        "compiled code crashed.",
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
        "of each step are in determinism.jsonl of the run's folder.",
        remedy="Fix what the message names (--deterministic-mode for kernels); `furlong diff RUN_A RUN_B` shows the "
        "first step and value that differ.",
        guides=(MD,),
    ),
)
