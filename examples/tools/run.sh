#!/usr/bin/env bash
# A multi-turn tool agent (agent.py): SFT shows the tiny model how to call a calculator, then RL teaches it when to.
#
#   bash examples/tools/run.sh         # two minutes on a CPU; any flag of `furlong train` can follow, for the RL run
#
# Watch `rollout/raw_reward` and `multi_turn/multi_turn_metric/round_number_mean` (1 without a call, 2 with one).
# Output goes to $OUT (default: outputs/tools), which must not contain a run yet.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
out="${OUT:-outputs/tools}"

model="$(python "$here/../sums.py" "$out")"
python "$here/demonstrations.py" "$out/demonstrations.jsonl"
steps="${SFT_STEPS:-200}"
furlong train --hf-checkpoint "$model" --prompt-data "$out/demonstrations.jsonl" --input-key prompt --label-key label \
  --loss-type sft_loss --rollout-batch-size 128 --num-rollout "$steps" --lr 1e-3 --lr-warmup-fraction 0.05 --lr-decay-style linear \
  --use-dynamic-batch-size --max-tokens-per-gpu 8192 \
  --save "$out/sft/checkpoints" --save-interval "$steps" --save-hf "$out/sft/hf_{rollout_id}" --output-dir "$out/sft"

furlong train --config "$here/../math/config.yaml" --hf-checkpoint "$out/sft/hf_$steps" \
  --prompt-data "$out/problems.jsonl" --custom-generate-function-path "$here/agent.py:generate" \
  --rollout-max-response-len 48 --log-multi-turn \
  --eval-prompt-data held_out "$out/held_out.jsonl" --eval-interval 10 --output-dir "$out/rl" "$@"
