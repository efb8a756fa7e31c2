"""The entries of five troubleshooting guides of slime and Miles, and the rows that say them.

docs/troubleshooting.md has the table. Entries that describe and answer no question of what is wrong are left out: what
packing is, where other programs keep their logs, whom to ask.
"""

from __future__ import annotations

from dataclasses import dataclass

from furlong.catalogue.row import MD, MQ, SD, SQ, ST


@dataclass(frozen=True)
class Entry:
    """One entry: the symptom, the rows that cover it, and the remedies that those rows must name."""

    guide: str
    seen: str
    rows: tuple[str, ...]
    names: tuple[str, ...] = ()


def _entry(guide: str, seen: str, rows: str, *names: str) -> Entry:
    return Entry(guide, seen, tuple(rows.split()), names)


ENTRIES = (
    _entry(MQ, "text is garbled", "CKPT01 CKPT02", "latest_checkpointed_iteration.txt", "--load", "--ref-load",
           "--ckpt-step"),
    _entry(MQ, "the job hangs at submission", "GPU01 GPU02 GPU05", "--colocate",
           "actor_num_nodes x actor_num_gpus_per_node", "rollout_num_gpus"),
    _entry(MQ, "what --max-tokens-per-gpu does, and out of memory with a small one", "CFG04 MEM01 MEM02",
           "--use-dynamic-batch-size", "rollout_max_response_len / context_parallel_size", "--context-parallel-size"),
    _entry(MQ, "transformers finds no model on several nodes", "CKPT07", "--hf-checkpoint"),
    _entry(MQ, "how to resume", "CKPT06", "--load", "--save"),
    _entry(MQ, "how batch sizes fit together", "CFG01",
           "rollout_batch_size x n_samples_per_prompt = global_batch_size x num_steps_per_rollout", "nearest"),
    _entry(MQ, "servers of one node take each other's ports", "GPU03 ENG05", "--rollout-num-gpus-per-engine"),
    _entry(MQ, "the gradient explodes", "TPL01 NUM03", "--apply-chat-template"),
    _entry(MQ, "generation does not end", "STOP01 STOP02", "--rollout-stop-token-ids", "--rollout-stop "),
    _entry(MQ, "illegal memory access", "ENG01", "--sglang-mem-fraction-static"),
    _entry(MQ, "JSONDecodeError of the compiler", "ENG02", "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1"),
    _entry(MQ, "gradients that are not finite", "NUM04", "--no-check-for-nan-in-loss-and-grad"),
    _entry(MD, "the first rollout is gibberish: parameters were not loaded", "CKPT01", "--load", "--ref-load"),
    _entry(MD, "the first rollout is gibberish: names are mapped to other layers", "CKPT03", "pipeline stages"),
    _entry(MD, "the first rollout is gibberish: an engine lost buffers", "CKPT03", "released a buffer"),
    _entry(MD, "the first rollout is gibberish: a base model with a chat template", "TPL03 TPL01", "instruct"),
    _entry(MD, "KL is not 0 at the first step", "NUM01", "--attention-backend flash", "1e-4", "above 1", "precision"),
    _entry(MD, "log-probs of an instruct model near -0.8", "TPL03", "furlong template check"),
    _entry(MD, "a large gradient at the first step", "NUM03 REW02", "--moe-permute-fusion", "--label-key"),
    _entry(MD, "out of memory at the second step", "MEM03", "--sglang-mem-fraction-static", "0.7", "0.6"),
    _entry(MD, "two runs differ", "DET01", "--debug-determinism", "--deterministic-mode"),
    _entry(MD, "garbled text although the parameters are right", "CKPT03 TPL01 TPL02", "template"),
    _entry(MD, "a mixture of experts collapses", "NUM05", "--use-rollout-routing-replay"),
    _entry(MD, "gradients that are not finite: a template, or an overflow", "NUM04 TPL01", "template", "overflow"),
    _entry(MD, "illegal memory access", "ENG01", "--sglang-mem-fraction-static"),
    _entry(MD, "JSONDecodeError of the compiler", "ENG02", "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1"),
    _entry(MD, "weights hang on their way", "SYNC01", "--update-weight-timeout", "NCCL_DEBUG=INFO"),
    _entry(MD, "log-probs of engine and trainer in FP8", "NUM02", "forward_logp_max_diff"),
    _entry(MD, "a worker that generates ahead is gone", "ASYNC02"),
    _entry(MD, "nothing moves", "HANG01", "stack"),
    _entry(SQ, "text is garbled", "CKPT01 CKPT02", "latest_checkpointed_iteration.txt", "--ckpt-step"),
    _entry(SQ, "the job hangs at submission", "GPU01 GPU02 GPU05", "--colocate", "rollout_num_gpus"),
    _entry(SQ, "out of memory in training", "MEM01 MEM02", "--max-tokens-per-gpu", "--context-parallel-size"),
    _entry(SQ, "conversations become longer than expected", "MEM02 TOOL02", "longest sample", "fewer turns"),
    _entry(SQ, "transformers finds no model on several nodes", "CKPT07", "--hf-checkpoint"),
    _entry(SQ, "how to resume", "CKPT06", "--load", "--save"),
    _entry(SQ, "how batch sizes fit together", "CFG01", "num_steps_per_rollout", "nearest"),
    _entry(SQ, "Max retries exceeded with /get_model_info", "ENG05 GPU03", "Max retries exceeded",
           "--rollout-num-gpus-per-engine"),
    _entry(SQ, "the gradient is large and the run ends", "NUM03 TPL01", "template"),
    _entry(SQ, "generation takes for ever and nothing comes", "STOP01 STOP02", "--rollout-stop-token-ids"),
    _entry(SQ, "illegal memory access", "ENG01", "--sglang-mem-fraction-static"),
    _entry(SQ, "JSONDecodeError of the compiler", "ENG02", "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1"),
    _entry(SQ, "gradients that are not finite", "NUM04", "--no-check-for-nan-in-loss-and-grad"),
    _entry(SD, "the rollout is not coherent", "CKPT03", "pipeline stages", "--check-weight-update-equal"),
    _entry(SD, "log-probs and those of the reference differ", "NUM01", "--attention-backend flash", "--fp32"),
    _entry(SD, "log-probs are far from 0", "TPL03 NUM01", "--apply-chat-template"),
    _entry(SD, "a large gradient with one step per rollout", "NUM03", "ppo_kl", "--moe-permute-fusion", "--clip-grad"),
    _entry(SD, "out of memory at the second step", "MEM03", "--sglang-mem-fraction-static"),
    _entry(SD, "routers of an INT4 model are zero", "QNT01 SYNC02", "quantization_config.ignore"),
    _entry(SD, "other weights that are not linear layers", "QNT01", "two-dimensional"),
    _entry(SD, "shards are missing", "CKPT04 QNT02", "model.safetensors.index.json", "every layer", "furlong check"),
    _entry(SD, "a parameter is all zeros in the engine", "SYNC02 CKPT03", "--check-weight-update-equal"),
    _entry(SD, "illegal memory access at scale", "ENG01", "CUDA_LAUNCH_BLOCKING=1", "--sglang-disable-cuda-graph",
           "speculative decoding", "DeepEP", "core dump"),
    _entry(ST, "an engine died", "ENG03", "--use-fault-tolerance", "--sglang-mem-fraction-static",
           "--rollout-batch-size", "--sglang-disable-cuda-graph"),
    _entry(ST, "engines are loaded unevenly", "ENG04", "--sglang-router-strategy round_robin",
           "--rollout-num-gpus-per-engine"),
    _entry(ST, "a weight sync times out", "SYNC01", "--update-weights-interval", "--colocate", "ibstat"),
    _entry(ST, "a weight sync fails on several nodes", "SYNC01", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE=0",
           "--distributed-timeout-minutes"),
    _entry(ST, "out of memory in training", "MEM01 MEM02", "--recompute-activations", "--micro-batch-size",
           "--sequence-parallel", "--max-tokens-per-gpu"),
    _entry(ST, "out of memory where GPUs are shared", "MEM03", "0.4", "--offload-optimizer-states", "shorter"),
    _entry(ST, "slow data", "DATA03", "--num-data-workers", "--streaming-data", "furlong data tokenize"),
    _entry(ST, "rows in another form", "DATA01", "--input-key", "--label-key"),
    _entry(ST, "the loss explodes", "NUM04 DATA02", "--lr", "--clip-grad", "--bf16", "empty"),
    _entry(ST, "the reward collapses", "REW02 REW01", "--kl-loss-coef", "--n-samples-per-prompt",
           "furlong reward test"),
    _entry(ST, "asynchronous training on shared GPUs", "CFG03", "--colocate", "--rollout-num-gpus"),
    _entry(ST, "stale weights", "ASYNC01", "--async-buffer-size", "--update-weights-interval 1"),
    _entry(ST, "tools' answers in the loss", "TOOL01", "loss_mask"),
    _entry(ST, "conversations outgrow the context", "TOOL02", "fewer turns", "--sglang-context-length"),
    _entry(ST, "a checkpoint cannot be loaded", "CKPT01 CKPT05", "--save", "resharded"),
    _entry(ST, "a reward function on its own", "REW01", "furlong reward test"),
    _entry(ST, "the equation of batch sizes", "CFG01", "num_steps_per_rollout", "nearest"),
)  # fmt: skip
