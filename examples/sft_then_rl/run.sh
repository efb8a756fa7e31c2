#!/usr/bin/env bash
# SFT, then RL: a few demonstrations of the right answers first, then RL with a verifier from the model that SFT wrote.
#
#   bash examples/sft_then_rl/run.sh   # about a minute on a CPU; any flag of `furlong train` can follow, for the RL run
#
# Output goes to $OUT (default: outputs/sft_then_rl), which must not contain a run yet.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
out="${OUT:-outputs/sft_then_rl}"

model="$(python "$here/../sums.py" "$out")"
evaluation=(--eval-prompt-data held_out "$out/held_out.jsonl" --eval-interval 10 --eval-max-response-len 8)
steps="${SFT_STEPS:-20}"

# 1. Demonstrations: with --loss-type sft_loss, the label is the response to learn.
furlong train --hf-checkpoint "$model" --prompt-data "$out/problems.jsonl@[:1000]" --input-key prompt --label-key label \
  --loss-type sft_loss --rollout-batch-size 50 --num-rollout "$steps" --lr 1e-4 --rm-type math "${evaluation[@]}" \
  --save "$out/sft/checkpoints" --save-interval "$steps" --save-hf "$out/sft/hf_{rollout_id}" --output-dir "$out/sft"

# 2. RL; the model that SFT wrote is also the reference model of the KL term.
furlong train --config "$here/../math/config.yaml" --hf-checkpoint "$out/sft/hf_$steps" \
  --prompt-data "$out/problems.jsonl@[1000:]" --rm-type math "${evaluation[@]}" \
  --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type k3 --output-dir "$out/rl" "$@"

furlong report "$out/sft" "$out/rl"
