#!/usr/bin/env bash
# A reward of your own (reward.py): partial credit for each correct digit, and the share of each kind of mistake.
#
#   bash examples/reward/run.sh        # about a minute on a CPU; any flag of `furlong train` can follow
#
# Output goes to $OUT (default: outputs/reward), which must not contain a run yet.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
out="${OUT:-outputs/reward}"

model="$(python "$here/../sums.py" "$out")"
score=(--custom-rm-path "$here/reward.py:reward" --reward-key score)

# Try the function on three rows before training.
furlong reward test "${score[@]}" --prompt-data "$out/problems.jsonl" --input-key prompt --label-key label

furlong train --config "$here/../math/config.yaml" --hf-checkpoint "$model" --prompt-data "$out/problems.jsonl" \
  "${score[@]}" --log-reward-category kind \
  --eval-prompt-data held_out "$out/held_out.jsonl" --eval-interval 10 --eval-reward-key exact \
  --output-dir "$out" "$@"
