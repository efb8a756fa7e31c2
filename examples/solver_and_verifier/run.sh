#!/usr/bin/env bash
# Two roles in one episode (agents.py): a solver, and a verifier that judges its answer.
#
#   bash examples/solver_and_verifier/run.sh   # two minutes on a CPU; any flag of `furlong train` can follow, for RL
#
# Watch `role/solver/reward` and `role/verifier/reward`.
# Output goes to $OUT (default: outputs/solver_and_verifier), which must not contain a run yet.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
out="${OUT:-outputs/solver_and_verifier}"

model="$(python "$here/../sums.py" "$out")"
python "$here/demonstrations.py" "$out/demonstrations.jsonl"
steps="${SFT_STEPS:-120}"
furlong train --hf-checkpoint "$model" --prompt-data "$out/demonstrations.jsonl" --input-key prompt \
  --loss-type sft_loss --rollout-batch-size 96 --num-rollout "$steps" \
  --lr 2e-3 --lr-warmup-fraction 0.05 --lr-decay-style linear --use-dynamic-batch-size --max-tokens-per-gpu 8192 \
  --save-hf "$out/sft/hf_{rollout_id}" --save "$out/sft/checkpoints" --save-interval "$steps" --output-dir "$out/sft"

furlong train --hf-checkpoint "$out/sft/hf_$steps" --prompt-data "$out/problems.jsonl" --input-key prompt \
  --label-key label --custom-generate-function-path "$here/agents.py:generate" \
  --custom-rm-path "$here/agents.py:reward" \
  --rollout-batch-size 16 --n-samples-per-prompt 8 --num-rollout 40 --rollout-max-response-len 8 --lr 1e-4 \
  --use-dynamic-batch-size --max-tokens-per-gpu 8192 --output-dir "$out/rl" "$@"
