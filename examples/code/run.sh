#!/usr/bin/env bash
# A code agent (coding.py): what the model writes runs in a sandbox, and its result is the reward.
#
#   bash examples/code/run.sh          # two minutes on a CPU; any flag of `furlong train` can follow
#
# The model knows sums, not chats, so plain.jinja shows it nothing but the task.
# Watch `env/Coding/reward` and `env/Coding/info/attempts`. Output goes to $OUT (default: outputs/code).
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
out="${OUT:-outputs/code}"

model="$(python "$here/../sums.py" "$out")"
furlong train --hf-checkpoint "$model" --environment "$here/coding.py:Coding" \
  --prompt-data "$out/problems.jsonl" --input-key prompt --label-key label --chat-template-path "$here/plain.jinja" --rollout-max-response-len 8 \
  --rollout-batch-size 8 --n-samples-per-prompt 4 --num-rollout 10 --lr 2e-4 --output-dir "$out/run" "$@"
