"""Flags that Miles adds to slime's and furlong does not take, each with the reason and what to use.

One row for flags with one reason; a name that ends with * stands for all that begin so.
"""

from __future__ import annotations

from furlong.config.compat.slime_flags import Refusal

OF_MILES: tuple[tuple[str, Refusal], ...] = (
    # something else does it here
    (
        "--fully-async --max-weight-staleness --async-max-concurrent-samples --async-data-buffer-capacity-factor "
        "--async-unused-samples-handler --custom-async-data-buffer-path",
        Refusal(
            "refused",
            "the rollouts that run ahead bound the age of weights",
            "give --async-buffer-size ROLLOUTS, or start train_async.py",
        ),
    ),
    (
        "--pause-generation-mode",
        Refusal("refused", "it has another name", "use --pause-mode hold for in_place, abort for abort"),
    ),
    ("--gradient-checkpointing", Refusal("refused", "it has slime's name", "use --recompute-activations")),
    (
        "--update-weight-transfer-mode",
        Refusal(
            "refused",
            "it has slime's names",
            "use --update-weight-transport, and --update-weight-mode delta for disk-delta",
        ),
    ),
    (
        "--rollout-external",
        Refusal("refused", "the addresses say it", "leave it out, and give --rollout-external-engine-addrs"),
    ),
    ("--warmup-ratio", Refusal("refused", "it has Megatron's name", "use --lr-warmup-fraction")),
    (
        "--fsdp-cpu-offload --fsdp-cpu-backend --fsdp-state-dict-cpu-offload",
        Refusal("refused", "it has another name", "use --offload-optimizer-states for less memory"),
    ),
    (
        "--keep-fp32-master",
        Refusal("refused", "with --bf16 the masters of the weights are always float32", "leave it out"),
    ),
    ("--attn-implementation", Refusal("refused", "the kernel follows from device and dtype", "leave it out")),
    (
        "--check-weight-update-selector --check-weight-update-skip-list --check-weight-update-allow-quant-error",
        Refusal("refused", "all tensors of every publication are compared by checksum", "leave it out"),
    ),
    (
        "--use-miles-router --miles-router-*",
        Refusal("refused", "the router is sglang-router", "use --sglang-router-strategy"),
    ),
    (
        "--tensorboard-dir --save-debug-event-data --memory-snapshot-path",
        Refusal("refused", "it is written to the run's folder", "name that by --output-dir"),
    ),
    (
        "--save-debug-trajectory-data",
        Refusal("refused", "dumps hold every field of every sample", "use --save-debug-rollout-data"),
    ),
    (
        "--debug-exit-after-rollout",
        Refusal(
            "refused", "a run may end early and go on", "give a smaller --num-rollout, then a larger one with --load"
        ),
    ),
    (
        "--dumper-*",
        Refusal(
            "refused", "batches are dumped, and tensors are hashed", "use --save-debug-train-data, --debug-determinism"
        ),
    ),
    (
        "--ci-*",
        Refusal("refused", "checks of the program are its tests, not flags of a run", "read metrics.jsonl of the run"),
    ),
    (
        "--custom-agent-function-path --generate-max-turns --generate-tool-* --generate-execute-tool-function-path",
        Refusal(
            "refused", "an agent is a function that asks the policy", "write it for --custom-generate-function-path"
        ),
    ),
    (
        "--use-miles-dashboard --dashboard-* --use-mlflow --mlflow-* --use-prometheus --prometheus-*",
        Refusal(
            "refused",
            "trackers are metrics.jsonl, TensorBoard and --use-wandb",
            "add one as docs/reference/hooks.md says",
        ),
    ),
    (
        "--use-dynamic-global-batch-size",
        Refusal(
            "refused", "a step has --global-batch-size completions, however many samples they make", "leave it out"
        ),
    ),
    # not built
    (
        "--lora-* --multi-lora-* --target-modules --exclude-modules --experts-shared-outer-loras "
        "--check-lora-weight-equal",
        Refusal("not-yet", "adapters (LoRA) are not built", "leave it out: all weights are trained"),
    ),
    (
        "--use-session-server --session-* --tito-model --max-seq-len",
        Refusal(
            "not-yet",
            "no server stands between an agent and the engine",
            "write the agent's turns for --custom-generate-function-path",
        ),
    ),
    (
        "--true-on-policy-* --batch-invariant-mode --recompute-logprobs-via-prefill",
        Refusal(
            "not-yet", "trainer and engine have kernels of their own", "correct what they differ by with --use-tis"
        ),
    ),
    (
        "--eval-num-gpus* --eval-sglang-* --eval-hf-dir --eval-keep-snapshots --eval-max-in-flight "
        "--eval-overflow-policy",
        Refusal("not-yet", "the engines of the rollouts evaluate too", "leave it out"),
    ),
    (
        "--ft-components --indep-dp --mini-ft-* --control-server-port --enable-witness --witness-* "
        "--enable-event-analyzer --save-local-weight-checksum --allow-partial-train-step",
        Refusal(
            "not-yet", "a lost trainer ends the run", "use --use-fault-tolerance for engines, and --save with --load"
        ),
    ),
    (
        "--offload-train-target --offload-train-disk-* --offload-rollout-level --stream-optimizer-state-* "
        "--rematerialize-param-from-master-weight --check-rematerialize-param-from-master-weight --low-memory-resume "
        "--train-memory-margin-bytes",
        Refusal("not-yet", "what is put away goes to the host's memory", "use --offload-train, --offload-rollout"),
    ),
    (
        "--use-indexer-replay --use-rollout-indexer-replay --miles-dsa-* --dsa-attention-backend",
        Refusal("not-yet", "sparse-attention indexers are not built", "leave it out"),
    ),
    (
        "--opd-*",
        Refusal("not-yet", "on-policy distillation is not built", "leave it out"),
    ),
    (
        "--p2p-transfer-* --object-store-backend --mooncake-* --rollout-submission-granularity "
        "--pin-rollout-manager-to-head --delay-split-train-data-by-dp --debug-skip-weight-update "
        "--debug-disable-optimizer --debug-deterministic-collective",
        Refusal("not-yet", "there is no such part", "leave it out"),
    ),
)


def refusal_of_miles(flag: str) -> Refusal | None:
    """Why a flag of Miles is not taken; None for any other."""
    for names, why in OF_MILES:
        if any(flag == name or (name.endswith("*") and flag.startswith(name[:-1])) for name in names.split()):
            return why
    return None
