"""Flags of slime, Miles and other programs that furlong does not accept: one row per reason, with what to use.

`not-yet` is a feature that this version lacks; `refused` is something that furlong does in another way. Such a flag is
never ignored: it is an error with this text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["refused", "not-yet"]


@dataclass(frozen=True)
class Refusal:
    """Why flags, or values of flags (`--flag value`), are not accepted. A name that ends with * is a prefix."""

    names: tuple[str, ...]
    verdict: Verdict
    reason: str
    instead: str

    def message(self, flag: str) -> str:
        """The problem to show for `flag`, as it was given."""
        what = "is not accepted" if self.verdict == "refused" else "is not supported yet"
        return f"{flag} {what}: {self.reason}; {self.instead}"


def _rows(verdict: Verdict, *rows: tuple[str, str, str]) -> tuple[Refusal, ...]:
    return tuple(Refusal(tuple(names.split()), verdict, reason, instead) for names, reason, instead in rows)


_OMIT = "remove it"
_NO_MEGATRON = "--train-backend megatron has no such setting"

SLIME: tuple[Refusal, ...] = (
    *_rows(
        "not-yet",
        ("--release-train --use-distributed-post",
         "trainer processes live as long as the run, and batches are sent through Ray's object store", _OMIT),
        ("--fp16", "training in float16 needs loss scaling", "use --bf16 or --fp32"),
        ("--overlap-param-gather", "layers read weights without calling the modules that would wait for them",
         "use --overlap-grad-reduce"),
        ("--qwen-gdn-backend", "linear attention uses the kernels of transformers", _OMIT),
        ("--freeze-indexer", "sparse-attention indexers are not implemented", "use --freeze-params-name-list"),
        ("--megatron-deepgemm-* --megatron-server-* --no-megatron-*", _NO_MEGATRON, _OMIT),
        ("--main-params-dtype --exp-avg-dtype --exp-avg-sq-dtype",
         "master weights and optimizer moments are float32", _OMIT),
        ("--fp8-format --fp8-recipe", "training in FP8 is not implemented", "use --bf16"),
        ("--tp-comm-overlap", "tensor-parallel communication does not overlap with GEMMs", _OMIT),
        ("--moe-shared-expert-overlap", "shared experts do not overlap with the dispatch of tokens", _OMIT),
        ("--multimodal-keys", "models are text-only", _OMIT),
        ("--load-forge-rollout-data", "a dump cannot be replayed through generation",
         "train on it with --load-debug-rollout-data")
    ),
    *_rows(
        "refused",
        ("--replay", "the completion order of prompt groups is not recorded",
         "repeat a run with --async-buffer-size 0, or train on its dumps with --load-debug-rollout-data"),
        ("--teacher-port --teacher-warmup-port --teacher-warmup-timeout-s --teacher-sample-reduction-chunk-size "
         "--teacher-label-reduction-chunk-size", "a teacher is a model of the trainer or an engine",
         "use --opd-teacher-load or --opd-teacher-urls"),
        ("--http-proxy", "requests are sent to engines directly", _OMIT),
        ("--hf", "it is not a flag of training", "name the model with --hf-checkpoint"),
        ("--logdir", "it is a flag of TensorBoard", "run `tensorboard --logdir outputs/`; furlong's is --output-dir"),
        ("--recompute-loss-function", "the loss never keeps the logits of the whole batch",
         "lower --log-probs-chunk-size to save memory"),
        ("--log-probs-max-tokens-per-gpu --log-prob-micro-batch-size-per-gpu --micro-rollout-batch-size",
         "log-prob passes use the micro-batches of training", "set --max-tokens-per-gpu"),
        ("--ckpt-format --ckpt-fully-parallel-save --ckpt-fully-parallel-load --ckpt-assume-constant-structure "
         "--dist-ckpt-optim-fully-reshardable",
         "checkpoints are whole tensors in safetensors, which any parallel layout and both backends read",
         "remove it; `furlong convert` reads and writes Megatron-LM checkpoints"),
        ("--main-grads-dtype", "gradients are float32", "use --grad-reduce-in-bf16 for bfloat16 models"),
        ("--override-opt-param-scheduler --use-checkpoint-opt-param-scheduler",
         "the learning rate follows from the flags of this start and the step of the checkpoint", _OMIT),
        ("--use-mcore-models", "Megatron-core's models are the only ones", _OMIT),
        ("--cross-entropy-loss-fusion", "the loss never keeps the logits of the whole batch", _OMIT),
        ("--use-cpu-initialization", "weights are loaded, not initialized", _OMIT),
        ("--moe-router-force-load-balancing", "it would train a different model than the engine runs", _OMIT),
        ("--memory-recorder", "memory is recorded by PyTorch",
         "use --record-memory-history; for host memory, run memray"),
        ("--memory-snapshot-dir", "snapshots are in profile/ of the run directory", "set it with --output-dir"),
        ("--ci-disable-kl-checker --ci-train-rollout-logprob-abs-diff-threshold",
         "checks of the program are its tests, not flags of a run", "read metrics.jsonl of the run"),
        ("--ci-save-grad-norm --ci-load-grad-norm", "gradient norms are in metrics.jsonl",
         "compare `train/grad_norm` of two runs there")
    )
)  # fmt: skip

_VALUE_ROWS: tuple[tuple[str, str, Verdict, str, str], ...] = (
    ("--engine", "vllm", "not-yet", "there is no client of vLLM", "use sglang, or embedded, which needs no package"),
    ("--attention-backend", "local", "refused", "it does not support packed sequences", "use unfused"),
    ("--recompute-modules", "core_attn", "refused",
     "attention kernels keep no scores and always recompute them in the backward pass", _OMIT),
    ("--moe-router-load-balancing-type", "sinkhorn", "refused",
     "no engine routes that way, so a different model would be trained than generates", "use aux_loss"),
    ("--moe-router-load-balancing-type", "global_aux_loss", "not-yet", "tokens are counted per micro-batch or sample",
     "use seq_aux_loss, which does not depend on packing"),
    ("--moe-token-dispatcher-type", "allgather", "refused",
     "it requires the same number of tokens on every rank, and packed micro-batches differ", "use alltoall"),
    ("--moe-router-dtype", "fp64", "not-yet", "routers compute in float32, as engines do", "use fp32"),
    *(("--opd-top-k-strategy", strategy, "refused",
       "the KL is a sum over what the policy would sample, and over tokens that it never samples it is "
       "unstable", "use only-student")
      for strategy in ("only-teacher", "intersection", "union", "xor")),
    *(("--opd-reward-weight-mode", mode, "refused", "the sum would not be the KL of the policy", "use student_p")
      for mode in ("teacher_p", "none")),
    *(("--advantage-estimator", name, "refused", "it is a name of other programs", f"use {row}")
      for name, row in (("gae", "ppo"), ("group_norm", "grpo"), ("reinforce++", "reinforce_plus_plus"))),
    ("--update-weight-delta-checksum", "blake3", "refused", "its library is not a dependency of furlong",
     "use xxh3-128, which has the same length"),
    *(("--loss-type", name, "refused", "the algorithm is another flag", f"use --advantage-estimator {name}")
      for name in ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "ppo")),
    *(("--loss-type", name, "refused", "it has another name", "use sft_loss") for name in ("sft", "nll")),
    ("--rm-type", "boxed_dapo", "refused", "dapo reads the line after 'Answer:', which is not inside a box",
     "use boxed_math or dapo"),
    ("--rm-type", "boxed_ifbench", "refused", "instructions concern the whole response, not what is in a box",
     "use ifbench"),
    ("--rm-type", "boxed_deepscaler", "refused", "deepscaler itself reads the box, after the end of the reasoning",
     "use deepscaler")
)  # fmt: skip
VALUES = {
    (flag, value): Refusal((f"{flag} {value}",), verdict, reason, instead)
    for flag, value, verdict, reason, instead in _VALUE_ROWS
}

MILES: tuple[Refusal, ...] = (  # flags that Miles adds to slime's
    *_rows(
        "refused",
        ("--async-max-concurrent-samples --async-data-buffer-capacity-factor "
         "--async-unused-samples-handler --custom-async-data-buffer-path",
         "the number of rollouts in flight bounds the staleness",
         "use --async-buffer-size ROLLOUTS, or run train_async.py"),
        ("--rollout-external", "the addresses imply it", "remove it, and give --rollout-external-engine-addrs"),
        ("--check-weight-update-selector --check-weight-update-skip-list --check-weight-update-allow-quant-error",
         "every weight update verifies all tensors by checksum", _OMIT),
        ("--use-miles-router --miles-router-*", "the router is sglang-router", "use --sglang-router-strategy"),
        ("--tensorboard-dir --save-debug-event-data --memory-snapshot-path", "it is written to the run directory",
         "set it with --output-dir"),
        ("--save-debug-trajectory-data", "dumps contain every field of every sample", "use --save-debug-rollout-data"),
        ("--debug-exit-after-rollout", "runs can be extended later",
         "use a smaller --num-rollout, then a larger one with --load"),
        ("--dumper-*", "batches are dumped and tensors are hashed",
         "use --save-debug-train-data, --debug-determinism"),
        ("--ci-check-* --ci-disable-* --ci-ft-* --ci-inject-* --ci-metric-* --ci-save-model-hash",
         "checks of the program are its tests, not flags of a run", "read metrics.jsonl of the run"),
        ("--generate-max-turns --generate-tool-* --generate-execute-tool-function-path",
         "an agent has its own loop and tools", "write it for --agent-function-path"),
        ("--dashboard-* --prometheus-*",
         "trackers are metrics.jsonl, TensorBoard, W&B, Trackio, MLflow and SwanLab",
         "add a tracker (docs/reference/metrics.md)"),
        ("--mlflow-experiment-name --mlflow-run-name", "furlong uses other names", "use --tracker-project, --run-name")
    ),
    *_rows(
        "not-yet",
        ("--lora-* --multi-lora-* --target-modules --exclude-modules --experts-shared-outer-loras "
         "--check-lora-weight-equal", "adapters (LoRA) are not implemented", "remove it: all weights are trained"),
        ("--true-on-policy-* --batch-invariant-mode --recompute-logprobs-via-prefill",
         "trainer and engine use different kernels", "correct the difference with --use-tis"),
        ("--eval-num-gpus* --eval-sglang-* --eval-hf-dir --eval-keep-snapshots --eval-max-in-flight "
         "--eval-overflow-policy", "the rollout engines also evaluate", _OMIT),
        ("--ft-components --indep-dp --mini-ft-* --control-server-port --enable-witness --witness-* "
         "--enable-event-analyzer --save-local-weight-checksum --allow-partial-train-step",
         "a lost trainer process ends the run",
         "use --use-fault-tolerance for engines, and --save with --load"),
        ("--offload-train-target --offload-train-disk-* --offload-rollout-level --stream-optimizer-state-* "
         "--rematerialize-param-from-master-weight --check-rematerialize-param-from-master-weight "
         "--low-memory-resume", "state is offloaded to host memory only",
         "use --offload-train, --offload-rollout"),
        ("--use-indexer-replay --use-rollout-indexer-replay --miles-dsa-* --dsa-attention-backend",
         "sparse-attention indexers are not implemented", _OMIT),
        ("--p2p-transfer-* --object-store-backend --mooncake-* "
         "--pin-rollout-manager-to-head --delay-split-train-data-by-dp --debug-skip-weight-update "
         "--debug-disable-optimizer --debug-deterministic-collective", "furlong has no such component", _OMIT)
    ),
)  # fmt: skip

OWN: tuple[Refusal, ...] = _rows(  # flags that furlong had, or is thought to have
    "refused",
    ("--hook-import-timeout", "modules of functions are imported in this process, not in a trial process first", _OMIT),
    (
        "--callbacks --callback",
        "there are no callback classes",
        "use a hook (docs/reference/hooks.md), or furlong.train(on_step=FUNCTION)",
    ),
    (
        "--push-to-hub --hub-model-id --hub-strategy",
        "nothing is uploaded",
        "upload the model after the run: `hf upload OWNER/NAME OUTPUT_DIR/model`",
    ),
    (
        "--device --cuda --use-cuda --gpu --cpu",
        "a run uses the GPUs that it sees, or else the CPU",
        "select GPUs with CUDA_VISIBLE_DEVICES, empty for the CPU",
    ),
    (
        "--precision --dtype --torch-dtype --model-dtype --mixed-precision --bf16-mode --amp",
        "each precision is a flag",
        "use --bf16 or --fp32, or neither: bfloat16 on CUDA, float32 on a CPU",
    ),
    ("--dry-run --check --validate-only", "a check is another command", "run `furlong doctor` with the same flags"),
    ("--logging-steps --log-steps", "every step is logged", _OMIT),
    ("--overwrite-output-dir --overwrite", "a run does not replace another one: its folder gets a number", _OMIT),
    ("--system-prompt", "prompts are those of the data", "write it into the rows as a message with the role system"),
    (
        "--packing-samples --packing --use-remove-padding --flash-attn --use-liger-kernel",
        "sequences are packed, and attention kernels chosen for the device",
        _OMIT,
    ),
    (
        "--max-samples --max-train-samples --train-max-samples --val-max-samples",
        "a slice of the file selects rows",
        "write 'FILE@[:N]'",
    ),
    (
        "--enforce-eager --enable-prefix-caching --enable-chunked-prefill --vllm-gpu-memory-utilization",
        "it is an option of vLLM",
        _OMIT,
    ),
    ("--num-iterations --ppo-epochs", "a batch is trained on once", "split it with --num-steps-per-rollout"),
    (
        "--max-epochs",
        "a batch is trained on once",
        "split it with --num-steps-per-rollout, or repeat the data with --num-epoch",
    ),
    (
        "--remote-rm-url",
        "a server and a function have flags of their own",
        "use --rm-type remote_rm --rm-url URL, or --custom-rm-path FILE.py:NAME",
    ),
    (
        "--deepspeed --zero-stage",
        "DeepSpeed is not used",
        "remove it: --train-backend fsdp, the default, shards as ZeRO-3 does",
    ),
    (
        "--tokenizer --tokenizer-path --processing-class",
        "the tokenizer is that of the model folder",
        "remove it; --chat-template-path replaces its template",
    ),
    ("--beta --kl-beta", "the KL loss has two flags", "use --use-kl-loss with --kl-loss-coef BETA"),
    (
        "--scale-rewards",
        "groups are divided by their standard deviation",
        "remove it for 'group', use --disable-grpo-std-normalization for 'none'",
    ),
    (
        "--importance-sampling-level",
        "the level follows from the algorithm",
        "remove it for 'token', use --advantage-estimator gspo for 'sequence'",
    ),
    (
        "--generation-kwargs",
        "each sampling parameter is a flag",
        "use flags such as --rollout-stop and --rollout-top-p",
    ),
    (
        "--repetition-penalty",
        "the trainer's log-probs would not match a penalized distribution",
        "penalize repetition in the reward",
    ),
    (
        "--tools --environment-factory --max-tool-calling-iterations",
        "tools belong to an environment",
        "give a class to --environment, such as one derived from furlong.environments.ToolEnvironment",
    ),
    ("--reward-weights", "several rewards are summed", "multiply each in its function"),
    ("--hook-memory-reserve", "the memory that functions take is not watched", "use the limits of the control group"),
)

# furlong's flag, and its names in other programs.
_OTHER_NAMES = {
    "--hf-checkpoint": "--model --model-path --model-name-or-path --base-model --pretrain --pretrained-model",
    "--prompt-data": "--dataset --data --data-path --dataset-name --train-file --train-data --train-files "
    "--train-dataset",
    "--lr": "--learning-rate --actor-learning-rate",
    "--critic-lr": "--critic-learning-rate",
    "--lr-warmup-iters": "--warmup-steps",
    "--lr-decay-style": "--lr-scheduler-type --lr-scheduler",
    "--clip-grad": "--max-grad-norm --grad-clip --gradient-clipping",
    "--num-epoch": "--epochs --num-epochs --num-train-epochs --num-episodes --total-epochs",
    "--num-rollout": "--max-steps --steps --num-steps --total-steps --iterations",
    "--n-samples-per-prompt": "--num-generations --num-samples --group-size --rollout-n",
    "--rollout-batch-size": "--batch-size --num-prompts",
    "--micro-batch-size": "--per-device-train-batch-size --per-device-batch-size --micro-train-batch-size",
    "--global-batch-size": "--gradient-accumulation-steps --mini-batch-size --ppo-mini-batch-size --train-batch-size",
    "--rollout-temperature": "--temperature",
    "--rollout-top-p": "--top-p",
    "--rollout-top-k": "--top-k",
    "--rollout-max-response-len": "--max-new-tokens --max-completion-length --max-response-length --max-tokens "
    "--max-response-len --generate-max-len",
    "--rollout-max-prompt-len": "--max-prompt-length --max-prompt-len --prompt-max-len",
    "--mask-truncated": "--mask-truncated-completions",
    "--debug-rollout-print-every": "--log-completions --num-completions-to-print",
    "--ref-update-interval": "--sync-ref-model --ref-model-sync-steps",
    "--advantage-estimator": "--algorithm --algo --adv-estimator --loss-algorithm --use-critic",
    "--kl-coef": "--init-kl-coef",
    "--kl-loss-type": "--kl-estimator",
    "--custom-rm-path": "--reward --rewards --reward-func --reward-funcs --reward-fn --reward-function",
    "--save-interval": "--save-steps --save-freq --save-every",
    "--eval-interval": "--eval-steps --eval-freq --eval-every",
    "--load": "--resume --resume-from --resume-from-checkpoint --load-checkpoint",
    "--output-dir": "--output --out --out-dir --output-path --run-dir",
    "--use-wandb": "--wandb --report-to",
    "--recompute-activations": "--activation-checkpointing --gradient-checkpointing --enable-gradient-checkpointing",
    "--actor-num-gpus-per-node": "--gpus --num-gpus --n-gpus --n-gpus-per-node --nproc-per-node --num-processes",
    "--actor-num-nodes": "--nnodes --num-nodes --num-machines",
    "--tensor-model-parallel-size": "--tp --tp-size --tensor-parallel-size",
    "--rollout-max-context-len": "--max-model-len --max-length --context-length --max-len",
    "--save": "--save-dir --save-path --checkpoint-dir --ckpt-path",
    "--eval-prompt-data": "--eval-file --eval-data --eval-dataset --test-file --test-files --val-file --val-files",
    "--input-key": "--prompt-key --prompt-column",
    "--label-key": "--answer-key --answer-column --label-column",
    "--keep-checkpoints": "--save-total-limit --max-ckpt-to-keep --max-ckpt-num",
    "--log-level": "--verbose --quiet --debug --logging-level",
    "--optimizer": "--optim",
    "--run-name": "--name --experiment-name --wandb-run-name",
    "--eps-clip": "--epsilon --clip-ratio --clip-range",
    "--eps-clip-high": "--epsilon-high --clip-ratio-high",
    "--entropy-coef": "--entropy-coeff",
    "--engine": "--use-vllm --vllm-mode",
    "--train-backend": "--trainer --fsdp",
    "--optimizer-cpu-offload": "--adam-offload",
    "--colocate": "--colocate-all-models --vllm-enable-sleep --deepspeed-enable-sleep",
    "--rollout-num-gpus": "--vllm-num-engines",
    "--rollout-num-gpus-per-engine": "--vllm-tensor-parallel-size",
    "--dynamic-sampling-filter-path": "--dynamic-filtering",
    "--async-buffer-size": "--async-train",
    "--lora-rank": "--use-lora --use-peft --peft --peft-config --qlora --load-in-4bit --load-in-8bit",  # not supported
}
# verl's settings, as `key=value`, and the flags here.
VERL_KEYS = {
    "data.train_files": "--prompt-data",
    "data.val_files": "--eval-prompt-data",
    "data.prompt_key": "--input-key",
    "data.train_batch_size": "--rollout-batch-size",
    "data.max_prompt_length": "--rollout-max-prompt-len",
    "data.max_response_length": "--rollout-max-response-len",
    "data.shuffle": "--rollout-shuffle",
    "actor_rollout_ref.model.path": "--hf-checkpoint",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "--recompute-activations",
    "actor_rollout_ref.actor.optim.lr": "--lr",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "--global-batch-size",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "--micro-batch-size",
    "actor_rollout_ref.actor.use_dynamic_bsz": "--use-dynamic-batch-size",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "--max-tokens-per-gpu",
    "actor_rollout_ref.actor.use_kl_loss": "--use-kl-loss",
    "actor_rollout_ref.actor.kl_loss_coef": "--kl-loss-coef",
    "actor_rollout_ref.actor.kl_loss_type": "--kl-loss-type",
    "actor_rollout_ref.actor.clip_ratio": "--eps-clip",
    "actor_rollout_ref.actor.entropy_coeff": "--entropy-coef",
    "actor_rollout_ref.actor.strategy": "--train-backend",
    "actor_rollout_ref.actor.fsdp_config.param_offload": "--offload-train",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": "--offload-train",
    "actor_rollout_ref.ref.fsdp_config.param_offload": "--offload-train",
    "actor_rollout_ref.rollout.name": "--engine",
    "actor_rollout_ref.rollout.n": "--n-samples-per-prompt",
    "actor_rollout_ref.rollout.temperature": "--rollout-temperature",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "--rollout-num-gpus-per-engine",
    "algorithm.adv_estimator": "--advantage-estimator",
    "algorithm.kl_ctrl.kl_coef": "--kl-coef",
    "custom_reward_function.path": "--custom-rm-path",
    "trainer.total_epochs": "--num-epoch",
    "trainer.total_training_steps": "--num-rollout",
    "trainer.n_gpus_per_node": "--actor-num-gpus-per-node",
    "trainer.nnodes": "--actor-num-nodes",
    "trainer.save_freq": "--save-interval",
    "trainer.test_freq": "--eval-interval",
    "trainer.experiment_name": "--run-name",
    "trainer.project_name": "--wandb-project",
    "trainer.default_local_dir": "--save",
    "trainer.logger": "--use-wandb",
    "trainer.resume_mode": "--load",
    "trainer.val_before_train": "--skip-eval-before-train for False",
    "trainer.balance_batch": "--balance-data",
    "trainer.max_actor_ckpt_to_keep": "--keep-checkpoints",
    "custom_reward_function.name": "--custom-rm-path FILE.py:NAME",
    "data.filter_overlong_prompts": "--rollout-max-prompt-len, which drops longer prompts",
    "data.truncation": "--rollout-max-prompt-len, which drops longer prompts",
    "algorithm.use_kl_in_reward": "--kl-coef",
    "algorithm.norm_adv_by_std_in_grpo": "--disable-grpo-std-normalization for False",
    "actor_rollout_ref.actor.loss_agg_mode": "--calculate-per-token-loss for token-mean",
    "actor_rollout_ref.actor.clip_ratio_low": "--eps-clip",
    "actor_rollout_ref.actor.clip_ratio_high": "--eps-clip-high",
    "actor_rollout_ref.actor.clip_ratio_c": "--eps-clip-c",
    "actor_rollout_ref.actor.grad_clip": "--clip-grad",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "--context-parallel-size",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "--sglang-mem-fraction-static",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "--eval-temperature",
    "actor_rollout_ref.rollout.val_kwargs.n": "--n-samples-per-eval-prompt",
}
FURLONG_NAMES = {name: flag for flag, names in _OTHER_NAMES.items() for name in names.split()}

_LORA = (
    "LoRA and other adapters are not supported: all weights are trained. To save GPU memory, use "
    "--optimizer-cpu-offload, --recompute-activations or more GPUs with --actor-num-gpus-per-node."
)
_LAUNCHER = (
    "There is no launcher: furlong starts its processes itself, on several GPUs with Ray "
    "(--actor-num-gpus-per-node, --actor-num-nodes)."
)
_PAIRS = "Losses on preference pairs are not supported: furlong trains on rewards (--rm-type, --custom-rm-path)."
_IMAGES = "Models are text-only: images, video and audio are not supported."
# Answers of `--help WORD` for what furlong does not have, or calls otherwise.
TOPICS = {
    **dict.fromkeys(("lora", "qlora", "peft", "adapter", "adapters"), _LORA),
    "vllm": "vLLM is not supported: generate with --engine sglang, or with furlong's own engine, the default.",
    **dict.fromkeys(
        ("deepspeed", "zero", "zero3"),
        "DeepSpeed is not used: --train-backend fsdp shards parameters, gradients and optimizer states as ZeRO-3 does, "
        "and --optimizer-cpu-offload keeps the states in host memory.",
    ),
    **dict.fromkeys(("accelerate", "torchrun"), _LAUNCHER),
    **dict.fromkeys(("dpo", "kto", "orpo"), _PAIRS),
    **dict.fromkeys(("image", "vision", "multimodal", "vlm"), _IMAGES),
}

_EXACT = {name: row for row in (*MILES, *SLIME, *OWN) for name in row.names if not name.endswith("*")}
_PREFIXES = {name[:-1]: row for row in (*SLIME, *MILES) for name in row.names if name.endswith("*")}


def find_refusal(flag: str) -> Refusal | None:
    """Return why `flag` is not accepted; None for a flag of furlong and for an unknown one."""
    flag = flag if flag in _EXACT else FURLONG_NAMES.get(flag, flag)
    return _EXACT.get(flag) or next((row for prefix, row in _PREFIXES.items() if flag.startswith(prefix)), None)
