"""Numerics of a training step."""

from __future__ import annotations

from furlong.core.catalogue.row import MD, MQ, SD, SQ, ST, Row

ROWS = (
    Row(
        "NUM01",
        "policy and reference differ at the first step",
        "PR",
        "error",
        symptom="KL is not 0 at step 1.",
        cause="Actor and reference have the same weights at that point: below 1e-4 the difference is kernel noise, "
        "above 1 a wrong --ref-load or precision.",
        checked="The tokenizer of --ref-load against that of --hf-checkpoint; then log-probs of the policy against "
        "those of the reference at step 0: equal, below 1e-4, above, above 1.",
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
        cause="Stale weights, another dtype or kernel, a transform of the sampling distribution, retokenized text, "
        "or different expert routing.",
        checked="The difference per token at step 0 and after each weight update (forward_logp_max_diff, mean, 99th "
        "percentile), and the share of each cause.",
        remedy="The message names the cause; --use-tis corrects a difference that cannot be removed.",
        guides=(MD,),
    ),
    Row(
        "NUM03",
        "gradient spike",
        "R",
        "warning",
        symptom="A large gradient norm at step 1 or later.",
        cause="The data or chat template does not fit the model, rewards are large, or the reward reads a wrong key.",
        checked="grad_norm against a running scale; with one step per rollout ppo_kl must be 0.",
        remedy="Check the template with `furlong template check`, the reward with `furlong reward test`, and "
        "--label-key; scale rewards to the range 0 to 1; later in a run lower --lr or --clip-grad. "
        "(--moe-permute-fusion in the guides concerns a kernel that furlong does not use: it has no effect.)",
        guides=(MQ, MD, SQ, SD),
    ),
    Row(
        "NUM04",
        "loss or gradient is not finite",
        "RX",
        "error",
        symptom="Loss or gradient becomes NaN or Inf.",
        cause="The learning rate is too high, activations overflow in float16 or FP8, or a sample or the chat template "
        "does not fit the model.",
        checked="Loss and gradients of every step; a step that is not finite is rejected, with its micro-batch and "
        "samples.",
        remedy="Lower --lr or --clip-grad, use --bf16, look at the sample; --no-check-for-nan-in-loss-and-grad skips "
        "and counts such steps.",
        guides=(MQ, MD, SQ, ST),
    ),
    Row(
        "NUM05",
        "engine and trainer route experts differently",
        "R",
        "warning",
        symptom="A mixture-of-experts model collapses after tens of steps.",
        cause="Small numerical differences select other experts, so the trained model differs from the one that "
        "generates.",
        checked="The fraction of the engine's expert choices that the trainer shares, if the engine reports them.",
        remedy="Use --use-rollout-routing-replay.",
        guides=(MD,),
    ),
)
