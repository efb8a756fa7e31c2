"""Numbers of a training step."""

from __future__ import annotations

from furlong.core.catalogue.row import MD, MQ, SD, SQ, ST, Row

ROWS = (
    Row(
        "NUM01",
        "policy and reference differ at the first step",
        "PR",
        "error",
        symptom="KL is not 0 at step 1.",
        cause="Actor and reference are the same weights then: below 1e-4 it is the kernels' jitter, above 1 a wrong "
        "--ref-load or precision.",
        checked="The tokens of --ref-load against those of --hf-checkpoint; then log-probs of the policy against those "
        "of the reference at step 0: equal, below 1e-4, above, above 1.",
        remedy="Check --ref-load; then precision (--fp32), parallel sizes, and with --train-backend megatron "
        "--attention-backend flash.",
        guides=(MD, SD),
    ),
    Row(
        "NUM02",
        "engine and trainer disagree on log-probs",
        "R",
        "error",
        symptom="The log-probs of training and rollout drift apart.",
        cause="Stale weights, another dtype or kernel, a transform of the sampling distribution, tokens encoded anew, "
        "or another routing of experts.",
        checked="The gap per token at step 0 and after each sync (forward_logp_max_diff, mean, 99th percentile), and "
        "which cause has which share.",
        remedy="The message names the cause; --use-tis corrects a gap that cannot be removed.",
        guides=(MD,),
    ),
    Row(
        "NUM03",
        "the gradient is far larger than before",
        "R",
        "warning",
        symptom="A large gradient norm at step 1 or later.",
        cause="Data or template do not fit the model, rewards are large, or the reward reads a wrong key.",
        checked="grad_norm against a running scale; with one step per rollout ppo_kl must be 0.",
        remedy="Check the template with `furlong template check`, the reward with `furlong reward test`, --label-key; "
        "scale rewards that are far from 0 to 1; later in a run lower --lr or --clip-grad. (--moe-permute-fusion "
        "of the guides is about a kernel that is not used here: it changes nothing.)",
        guides=(MQ, MD, SQ, SD),
    ),
    Row(
        "NUM04",
        "loss or gradient is not finite",
        "RX",
        "error",
        symptom="Loss or gradient becomes NaN or Inf.",
        cause="A learning rate that is too high, activations that overflow in float16 or FP8, or a sample or a chat "
        "template that does not fit the model.",
        checked="Loss and gradients of every step; one not finite is refused, with its micro-batch and samples.",
        remedy="Lower --lr or --clip-grad, use --bf16, look at the sample; --no-check-for-nan-in-loss-and-grad skips "
        "and counts such steps.",
        guides=(MQ, MD, SQ, ST),
    ),
    Row(
        "NUM05",
        "experts are routed differently in engine and trainer",
        "R",
        "warning",
        symptom="A mixture-of-experts model collapses after tens of steps.",
        cause="Small differences in arithmetic choose other experts, so another model is trained than generated.",
        checked="The share of the engine's choices of experts that are the trainer's, too, where it tells them.",
        remedy="Give --use-rollout-routing-replay.",
        guides=(MD,),
    ),
)
