"""Engines, and weights on their way to them."""

from __future__ import annotations

from furlong.core.catalogue.row import MD, MQ, SD, SQ, ST, Row

ROWS = (
    Row(
        "ENG01",
        "illegal memory access in an engine",
        "X",
        "error",
        symptom="`an illegal memory access was encountered` in an engine's log.",
        cause="Mostly out of memory in disguise; then the padding of CUDA graphs, or speculative decoding.",
        checked="The engine's log.",
        remedy="In this order: lower --sglang-mem-fraction-static or --sglang-server-concurrency; "
        "CUDA_LAUNCH_BLOCKING=1 in the environment; "
        "--sglang-disable-cuda-graph; speculative decoding off; DeepEP off; a core dump of the GPU "
        "(CUDA_ENABLE_COREDUMP_ON_EXCEPTION=1) names the kernel.",
        guides=(MQ, MD, SQ, SD),
    ),
    Row(
        "ENG02",
        "the compiler's cache is damaged",
        "X",
        "error",
        symptom="`JSONDecodeError` from torch inductor.",
        cause="Several processes wrote the compile cache at once, or one was killed while it wrote.",
        checked="The traceback.",
        remedy="TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 in the environment of the run",
        guides=(MQ, MD, SQ),
    ),
    Row(
        "ENG03",
        "an engine died",
        "RX",
        "error",
        symptom="Connection errors while generating; an engine's process is gone.",
        cause="It ran out of memory or its kernel failed; its log has the last words.",
        checked="Exit of the process, and health requests that fail.",
        remedy="--use-fault-tolerance starts it again; lower --sglang-mem-fraction-static (or raise it, where its log "
        "says that the cache is too small) or --rollout-batch-size; --sglang-disable-cuda-graph to find the cause.",
        guides=(ST,),
    ),
    Row(
        "ENG04",
        "engines are loaded unevenly",
        "R",
        "warning",
        symptom="Some engines are busy while others idle.",
        cause="The router sends what shares a prefix to the same engine.",
        checked="Running requests per engine over a window: the largest against the mean.",
        remedy="--sglang-router-strategy round_robin, or more engines with a smaller --rollout-num-gpus-per-engine.",
        guides=(ST,),
    ),
    Row(
        "ENG05",
        "an engine cannot be reached",
        "PX",
        "error",
        symptom="`Max retries exceeded with url: /get_model_info`.",
        cause="The engine is still starting, it died, or its port belongs to another process.",
        checked="A connection to each of --rollout-external-engine-addrs; then the traceback, the process, and who "
        "listens on the port.",
        remedy="The message says which of the three; see GPU03 for a taken port. Fewer engines on a machine, by a "
        "larger --rollout-num-gpus-per-engine, want fewer ports.",
        guides=(MQ, SQ),
    ),
    Row(
        "ENG06",
        "an engine takes requests and does not answer",
        "R",
        "warning",
        symptom="The run stands still in a rollout or a publication; every process is there and no log moves.",
        cause="The engine's process is stopped, its engine was put to sleep by somebody else, or a kernel or a "
        "collective in it does not end.",
        checked="An engine that owes an answer for 30 s is asked for a token (/health_generate), or while it loads "
        "weights whether it lives (/health), for 30 s more.",
        remedy="The message has its requests, the seconds of silence and what its health check said. The run waits "
        "until --sglang-router-request-timeout-secs; --use-fault-tolerance starts such an engine again.",
    ),
    Row(
        "SYNC01",
        "a weight sync does not end",
        "RX",
        "error",
        symptom="Training hangs after a rollout, or the update of weights times out.",
        cause="A rank does not take part, or what weights go by (a network, a file system, an engine that loads) is "
        "wrong or slow.",
        checked="A deadline for each bucket; after it, the engines that have not answered, the bucket, the transport.",
        remedy="By NCCL: NCCL_SOCKET_IFNAME=IFACE, NCCL_DEBUG=INFO, NCCL_TIMEOUT=1800 in the environment; where there "
        "is InfiniBand, `ibstat` and NCCL_IB_DISABLE=0. By gloo: GLOO_SOCKET_IFNAME=IFACE. By disk: a faster file "
        "system. A larger --update-weights-interval; --colocate.",
        guides=(MD, ST),
    ),
    Row(
        "SYNC02",
        "a parameter never arrives in the engine",
        "R",
        "error",
        symptom="A parameter is all zeros in the engine, or never changes while training.",
        cause="It was quantized under a name that the engine skips (QNT01), or it is frozen.",
        checked="After each sync: tensors that are all zero, and tensors whose checksum never changes.",
        remedy="Add it to quantization_config.ignore of config.json; check --freeze-params-name-list.",
        guides=(SD,),
    ),
    Row(
        "SYNC03",
        "the engine computes with weights that it had before",
        "P",
        "warning",
        symptom="Log-probs of engine and trainer grow apart over a run, though every publication is verified.",
        cause="SGLang 0.5.16 makes a float32 copy of the routers of GLM-4-MoE models at their first forward pass, and "
        "keeps it whatever weights arrive.",
        checked="config.json of --hf-checkpoint, --engine sglang, and which parameters are trained.",
        remedy="--freeze-params-name-list 'mlp\\.gate\\.weight', or an SGLang that forgets `_weight_fp32` when it "
        "loads weights.",
    ),
    Row(
        "SYNC04",
        "the engine has an output layer of its own",
        "P",
        "error",
        symptom="Every token is as probable as every other in the engine, or its log-probs are those of a model that "
        "was not trained.",
        cause="SGLang 0.5.16 reads tie_word_embeddings for dense models and DeepSeek's; models of GLM-4-MoE, gpt-oss, "
        "Qwen2-MoE and Qwen3-MoE get an output layer in any case, which stays as it was allocated if the files have "
        "none.",
        checked="config.json of --hf-checkpoint and --engine sglang; with servers started elsewhere their family, at "
        "the first publication.",
        remedy="In the model's folder set tie_word_embeddings to false and add the embedding once more as "
        "lm_head.weight; or --engine embedded.",
    ),
)
