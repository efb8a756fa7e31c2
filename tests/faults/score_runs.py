"""Faults of runs, as metrics, events and logs, for the score of diagnoses."""

from __future__ import annotations

from typing import Any

from diagnosis_score import Case, happened, log, steps
from furlong.errors import ENGINE_HANGS, ENGINE_UNANSWERED

GAP = "train/train_rollout_logprob_abs_diff"
CUSTOM = {"custom_generate_function_path": "own.py:generate"}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.01, "kl_loss_type": "k3"}
FLAT_ROW = {"rollout/zero_std_frac": 1.0, "rollout/reward_range": 0.0}
WAITS = {"perf/wait_time_ratio": 0.9, "perf/rollout_time": 10.0, "perf/step_time": 10.0}


def _gap(size: float, **shares: float) -> dict[str, float]:
    return {GAP: size} | {f"selftest/share/{name}": share for name, share in shares.items()}


def _rewards(*means: float, flat: bool = True, **more: float) -> list[dict[str, float]]:
    row = FLAT_ROW if flat else {"rollout/zero_std_frac": 0.2, "rollout/reward_range": 1.0}
    return [row | {"rollout/raw_reward": mean} | more for mean in means]


GOOD = _rewards(*[0.6] * 10, flat=False)


def _norms(*norms: float, **more: float) -> list[dict[str, float]]:
    return [{"train/grad_norm": norm} | more for norm in norms]


ROLLOUTS = (
    steps("no response ends", "STOP02", [{"rollout/truncated_ratio": 1.0}], {"rollout_max_response_len": 8},
          remedy="--rollout-stop-token-ids|--rollout-max-response-len"),
    steps("no response ends before the context", "STOP02", [{"rollout/truncated_ratio": 0.97}],
          remedy="--rollout-max-context-len"),
    steps("responses do not end after an update", "STOP02",
          [{"rollout/truncated_ratio": 0.0}, {"rollout/truncated_ratio": 1.0}], remedy="--lr",
          without="--rollout-stop"),
    steps("responses at temperature 3", "STOP02", [{"rollout/truncated_ratio": 1.0}],
          {"rollout_temperature": 3.0, "rollout_max_response_len": 8}, remedy="--rollout-temperature"),
    steps("a minimum as long as the maximum", "STOP02", [{"rollout/truncated_ratio": 1.0}],
          {"rollout_min_new_tokens": 8, "rollout_max_response_len": 8}, remedy="--rollout-min-new-tokens"),
    steps("no right answer", "REW02", _rewards(0.0, 0.0, 0.0), {"label_key": "answer"}, remedy="--label-key"),
    steps("every answer right", "REW02", _rewards(1.0, 1.0, 1.0), remedy="harder"),
    steps("every reward 0.5", "REW02", _rewards(0.5, 0.5, 0.5), remedy="reward function", without="too hard|too easy"),
    steps("groups right or wrong as a whole", "REW02",
          _rewards(0.25, 0.25, 0.25, flat=True, **{"rollout/reward_range": 1.0}), remedy="--rollout-temperature",
          without="--label-key"),
    steps("a policy that collapsed", "REW02", [*GOOD, *_rewards(0.0, 0.0, 0.0)], remedy="--lr",
          without="--label-key"),
    steps("a policy that fades", "REW02", [*GOOD, *_rewards(*[0.02] * 9, flat=False)], remedy="--lr"),
    steps("an entropy bonus that wins", "REW02", [*GOOD, *_rewards(0.0, 0.0, 0.0)], {"entropy_coef": 1.0},
          remedy="--entropy-coef"),
    steps("a KL loss that wins", "REW02", [*GOOD, *_rewards(0.0, 0.0, 0.0)], KL | {"kl_loss_coef": 1000.0},
          without="a larger --kl-loss-coef"),
    steps("one sample per prompt, all 0", "REW02", _rewards(0.0, 0.0, 0.0),
          {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True, "n_samples_per_prompt": 1,
           "rollout_batch_size": 32}, without="--n-samples-per-prompt"),
    steps("rewards that raise", "REW03", [{"rollout/reward_failed": 8.0}], {"rollout_batch_size": 8},
          remedy="furlong reward test"),
    steps("rewards that time out", "REW03", [{"rollout/reward_timed_out": 8.0}], {"rollout_batch_size": 8},
          remedy="--reward-timeout"),
    steps("rewards that a step waits for", "REW04", [WAITS | {"perf/reward_wait_time": 8.0}] * 3,
          {"custom_rm_path": "own.py:reward"}, remedy="--num-reward-workers|async def"),
    steps("a slow reward server", "REW04", [WAITS | {"perf/reward_wait_time": 8.0}] * 3,
          {"rm_type": "remote_rm", "rm_url": "http://127.0.0.1:1"}, remedy="--rm-url"),
    steps("a generate function that raises", "HOOK01", [{"rollout/generate_failed": 8.0}],
          CUSTOM | {"rollout_batch_size": 8}, remedy="run.log"),
    steps("a generate function that times out", "HOOK01", [{"rollout/generate_timed_out": 8.0}],
          CUSTOM | {"rollout_batch_size": 8}, remedy="--generate-timeout"),
    steps("a generate function that blocks", "HOOK02",
          [{"perf/generate_held_time": 6.0, "perf/rollout_time": 8.0}], CUSTOM, remedy="httpx.AsyncClient"),
    steps("prompts that are slow to read", "DATA03", [WAITS | {"perf/data_time": 4.0}] * 3,
          remedy="--num-data-workers"),
    steps("samples above the bound", "ASYNC01", [{"rollout/staleness/max": 3.0, "rollout/staleness/mean": 2.0}],
          {"async_buffer_size": 1}, remedy="--async-buffer-size"),
    steps("old samples of partial rollouts", "ASYNC01",
          [{"rollout/staleness/max": 6.0, "rollout/staleness/mean": 4.0}],
          {"partial_rollout": True, "over_sampling_batch_size": 64}, remedy="--over-sampling-batch-size"),
    steps("a policy that moved on", "ASYNC01",
          [{GAP: 0.6, "rollout/staleness/max": 2.0, "rollout/staleness/mean": 1.5}] * 8, {"async_buffer_size": 2},
          remedy="--async-buffer-size|--lr"),
    steps("tool output in the loss", "TOOL01", [{"rollout/env_tokens_in_loss": 32.0}], CUSTOM,
          remedy="trainable=False"),
    steps("ids of decoded text", "AGT01",
          [{"session/retokenised": 12.0, "session/forked_frac": 1.0, "session/leaves": 3.0}], CUSTOM,
          remedy="token_ids", without="--session-leaves"),
    steps("eight samples of each episode", "AGT02", [{"session/forked_frac": 0.9, "session/leaves": 8.0}], CUSTOM,
          remedy="--session-leaves last"),
    steps("thinking that the template drops", "AGT03", [{"session/branch_reason/stripped": 40.0}], CUSTOM,
          remedy="--chat-template-path"),
    steps("turns that go to any engine", "AGT04", [{"rollout/prefix_cache_hit_frac": 0.2}] * 3, CUSTOM,
          remedy="--sglang-router-strategy|--max-concurrent-episodes"),
    steps("an environment that blocks", "AGT05", [{"perf/generate_held_time": 6.0, "perf/rollout_time": 8.0}],
          {"environment": ["own.py:Env"]}, remedy="--env-workers", without="httpx"),
    steps("sandboxes that are evicted", "AGT06", [{"rollout/episodes/reissued": 8.0, "rollout/episodes/infra": 2.0}],
          CUSTOM | {"rollout_batch_size": 8}, remedy="run.log"),
    steps("agents of another endpoint", "AGT07",
          [{"rollout/episodes/silent": 8.0, "rollout/generate_failed": 8.0}],
          {"agent_command": "python agent.py", "rollout_batch_size": 8}, remedy="OPENAI_BASE_URL"),
    steps("environments that crash", "AGT08",
          [{"rollout/episodes/reissued": 8.0, "rollout/episodes/process_ended": 8.0}],
          {"environment": ["own.py:Env"], "env_workers": ["process", "2"], "rollout_batch_size": 8},
          remedy="run.log"),
    steps("a context that fills up", "TOOL02", [{"rollout/context_full_frac": 0.5}],
          CUSTOM | {"rollout_max_context_len": 64}, remedy="--rollout-max-context-len"),
)  # fmt: skip

NUMBERS = (
    steps("a small KL to the same weights", "NUM01", [{"train/kl_loss": 2e-3}], KL, remedy="--fp32"),
    steps("a large KL to the same weights", "NUM01", [{"rollout/kl": 2.0}], KL),
    steps("another model as the reference", "NUM01", [{"selftest/ref_kl": 0.8}],
          KL | {"hf_checkpoint": "policy", "ref_load": "other"}, remedy="--ref-load"),
    steps("log-probs of another temperature", "NUM02", [_gap(0.3, sampling_transform=0.9, numerics=0.1)],
          remedy="--rollout-temperature"),
    steps("text that was encoded again", "NUM02", [_gap(0.3, retokenisation=0.8, numerics=0.2)],
          remedy="append_response_tokens"),
    steps("weights of an older version", "NUM02", [_gap(0.3, stale_version=1.0)],
          remedy="--update-weights-interval 1"),
    steps("log-probs that are all the same", "NUM02", [_gap(2.0, flat=1.0)], remedy="--check-weight-update-equal"),
    steps("other experts", "NUM02", [_gap(0.2, routing=0.7, numerics=0.3)], remedy="--use-rollout-routing-replay"),
    steps("another precision", "NUM02", [_gap(0.05, numerics=1.0)], remedy="--embedded-dtype|--use-tis"),
    steps("another context: 3 per token", "NUM02", [_gap(3.0, numerics=1.0)], without="use the same precision"),
    steps("a gap of unknown origin", "NUM02", [{GAP: 0.2}], remedy="--check-weight-update-equal"),
    steps("a first gradient of 2,000", "NUM03", _norms(2000.0), remedy="--label-key"),
    steps("a gradient that jumps", "NUM03", _norms(*[1.0] * 12, 60.0), remedy="--lr|--clip-grad"),
    steps("rewards in thousands", "NUM03", _norms(5000.0, **{"rollout/reward_range": 10_000.0}),
          {"grpo_std_normalization": False}, remedy="--disable-grpo-std-normalization"),
    steps("two passes that differ", "NUM03", [{"train/ppo_kl": 0.05}], remedy="--fp32"),
    steps("experts that disagree", "NUM05", [{"train/routing_agreement": 0.6}],
          remedy="--use-rollout-routing-replay"),
    steps("plain questions to an instruct model", "TPL03", [{"rollout/log_probs": -1.2}],
          remedy="furlong doctor"),
    steps("a model without its weights", "TPL03", [{"rollout/log_probs": -9.0}], remedy="furlong check"),
)  # fmt: skip

LOST: dict[str, Any] = {"event": "engine_lost", "engine": 0, "url": "http://127.0.0.1:1"}
COMPARED = {
    "event": "weights_compared", "version": 4, "tensors": 60, "changed": 57,
    "unchanged": ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"],
}  # fmt: skip
RANKS = {
    "event": "ranks_timed", "rollout": 9, "seconds": 2.0, "stages": 1, "layers_s": [0.5, 0.5, 1.5, 0.5],
    "per_cost_s": [0.5, 0.5, 1.5, 0.5], "slowest": 2, "place": "trainer rank 2 (host b, GPU 2)",
}  # fmt: skip

MACHINES = (
    steps("one busy engine", "ENG04", [{"engine/requests/max": 30.0, "engine/requests/mean": 8.0}] * 5,
          remedy="--sglang-router-strategy round_robin"),
    steps("weight updates of a minute", "SYNC01", [{"perf/update_weights_time": 60.0, "perf/step_time": 80.0}] * 3,
          remedy="--update-weights-interval"),
    steps("an engine that keeps memory", "MEM03",
          [{"memory/engine_kept_frac": kept, "memory/trainer_peak_frac": 0.7} for kept in (0.06, 0.12)],
          remedy="--sglang-max-running-requests"),
    steps("a trainer that keeps memory", "MEM03", [{"memory/trainer_kept_frac": kept} for kept in (0.06, 0.2)],
          remedy="--sglang-mem-fraction-static"),
    steps("host memory that fills up", "MEM04", [{"perf/host_memory_frac": 0.5 + 0.012 * i} for i in range(34)]),
    happened("weights that do not arrive", "SYNC01",
             [{"event": "weight_update_timeout", "version": 3, "seconds": 300, "transport": "nccl", "missing": ["0"]}],
             remedy="--update-weight-timeout"),
    happened("matrices that never change", "SYNC02", [COMPARED] * 4, remedy="--freeze-params-name-list"),
    happened("a slow rank", "RANK01", [RANKS] * 8),
    happened("an engine that died", "ENG03", [LOST | {"reason": "was ended by signal 9"}],
             remedy="--use-fault-tolerance"),
    happened("an engine of SGLang that died", "ENG03", [LOST | {"reason": "ended with exit code 1"}],
             {"engine": "sglang"}, remedy="--sglang-mem-fraction-static"),
    happened("an engine that hangs", "ENG03", [LOST | {"reason": "no answer", "code": ENGINE_HANGS}],
             remedy="--rollout-health-check-timeout"),
    happened("an engine that does not answer", "ENG03", [LOST | {"reason": "closed", "code": ENGINE_UNANSWERED}],
             {"use_fault_tolerance": True}, remedy="log", without="--use-fault-tolerance"),
    happened("an engine that is stopped", "ENG06",
             [{"event": "engine_silent", "url": "http://127.0.0.1:1", "running": 4, "asked": "/generate",
               "seconds": 31, "health": "no answer"}], remedy="kill -CONT"),
    happened("GPUs that others use", "GPU02",
             [{"event": "placement_waiting", "seconds": 30, "asked": "8 GPUs", "free": "4 GPUs"}],
             remedy="--actor-num-gpus-per-node"),
    happened("a reward that never returns", "HANG01",
             [{"event": "hang", "seconds": 3600, "doing": "reward calls are running", "probable": "REW03",
               "report": "hang_0.txt", "last": {}}], remedy="--reward-timeout"),
    happened("weights that hang", "HANG01",
             [{"event": "hang", "seconds": 3600, "doing": "a weight update", "probable": "SYNC01",
               "report": "hang_0.txt", "last": {}}], remedy="SYNC01"),
    happened("a worker thread that died", "ASYNC02",
             [{"event": "worker_died", "worker": "AsyncRolloutWorker", "error": "KeyError", "message": "'x'"}],
             remedy="run.log"),
)  # fmt: skip


def _traceback(function: str, error: str, file: str = "furlong/training/worker.py") -> str:
    return f'Traceback (most recent call last):\n  File "{file}", line 9, in {function}\n    call()\n{error}\n'


CUDA_OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB "
    "of which 1.00 GiB is free."
)
SRT = "sglang/srt/"

LOGS = (
    log("memory in the backward pass", "MEM02", _traceback("forward_backward", CUDA_OOM), {"max_tokens_per_gpu": 8192},
        remedy="--max-tokens-per-gpu 4096|--recompute-activations"),
    log("memory with large micro-batches", "MEM02", _traceback("forward_backward", CUDA_OOM), {"micro_batch_size": 8},
        remedy="--micro-batch-size 4"),
    log("memory of CUDA graphs", "MEM02", _traceback("init_cuda_graphs", CUDA_OOM, f"{SRT}cuda_graph_runner.py"),
        remedy="--sglang-mem-fraction-static|--sglang-cuda-graph-max-bs"),
    log("memory at the second step", "MEM03", _traceback("forward_backward", CUDA_OOM), {"colocate": True},
        num_steps=1, remedy="--offload-optimizer-states"),
    log("memory that an engine does not get back", "MEM03",
        "[torch_memory_saver.cpp] CUresult error result=2 out of memory file=core.cpp func=resume line=1",
        remedy="--sglang-mem-fraction-static"),
    log("a share too small for the weights", "MEM02",
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
        remedy="raise --sglang-mem-fraction-static"),
    log("memory of others on the GPU", "GPU04", "ValueError: The memory capacity is unbalanced. Some GPUs may be used",
        remedy="nvidia-smi|CUDA_VISIBLE_DEVICES"),
    log("host memory in training", "MEM02",
        _traceback("optim_step", "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried "
                   "to allocate 8589934592 bytes.")),
    log("host memory of generation on a CPU", "MEM02",
        _traceback("generate", "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 "
                   "bytes.", "furlong/inference/embedded/slot_batch.py"),
        {"engine": "embedded"}, without="--recompute-activations|--max-tokens-per-gpu"),
    log("a machine that runs out of memory", "MEM02",
        "Ray ended it, as its machine ran low on memory (0.96 used)", remedy="--num-reward-workers"),
    log("an illegal memory access", "ENG01",
        _traceback("forward", "RuntimeError: CUDA error: an illegal memory access was encountered", f"{SRT}model.py"),
        remedy="--sglang-mem-fraction-static|CUDA_LAUNCH_BLOCKING=1"),
    log("a broken compiler cache", "ENG02",
        _traceback("load", "json.decoder.JSONDecodeError: Expecting value", "torch/_inductor/codecache.py"),
        remedy="TORCHINDUCTOR_FORCE_DISABLE_CACHES=1"),
    log("an engine that is not up", "ENG05", "HTTPConnectionPool: Max retries exceeded with url: /get_model_info",
        remedy="wait"),
    log("an engine whose port is taken", "ENG05 GPU03",
        "Max retries exceeded with url: /get_model_info\n[Errno 98] address already in use", remedy="port",
        also="GPU03"),
    log("a port that is taken", "GPU03", "OSError: [Errno 98] Address already in use ('127.0.0.1', 8265)",
        remedy="another port"),
    log("a killed engine", "ENG03", "engine 0 at http://127.0.0.1:1: process 7 was ended by signal 9",
        {"engine": "sglang"}, remedy="--use-fault-tolerance|oom", without="--sglang-disable-cuda-graph"),
    log("a killed trainer rank", "ENG03", "ray.exceptions.ActorDiedError: The actor died: Trainer rank 1",
        without="--use-fault-tolerance"),
    log("a collective that times out", "SYNC01",
        "[rank1] Watchdog caught collective operation timeout: WorkNCCL(OpType=BROADCAST)",
        remedy="--distributed-timeout-minutes"),
    log("gloo that times out", "SYNC01",
        "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:84] Timed out waiting 1800000ms for recv operation"),
    log("logits that are not finite", "NUM04", "EngineError: logits of request 12 are not finite", remedy="--lr"),
    log("a full disk", "DISK01", _traceback("save", "OSError: [Errno 28] No space left on device: '/ckpt/w'")),
    log("a quota", "DISK01", "OSError: [Errno 122] Disk quota exceeded"),
    log("a limit on file sizes", "DISK01", "OSError: [Errno 27] File too large", remedy="ulimit -f"),
    log("GPUs that did not come", "GPU02", "waiting for placement: 8 GPUs are missing 4 of them",
        remedy="--placement-timeout"),
)  # fmt: skip

CASES: tuple[Case, ...] = (*ROLLOUTS, *NUMBERS, *MACHINES, *LOGS)
