#!/usr/bin/env bash
# Train the quickstart's model on addition: `bash run.sh [math|reward|tool_use] [FLAGS]`, for example
#   bash run.sh reward --num-rollout 30 --lr 2e-4
# Data and run output are written to $OUT (default: outputs/arithmetic-VARIANT), which must not contain a run yet.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
variant="${1:-math}"
[ $# -gt 0 ] && shift
case "$variant" in
  math) score=(--rm-type math) ;;
  reward) score=(--custom-rm-path "$here/reward.py:reward" --reward-key score --eval-reward-key exact
    --log-reward-category kind) ;;
  tool_use) score=(--custom-generate-function-path "$here/tool_use.py:generate" --rollout-max-response-len 32
    --log-multi-turn) ;;
  *) echo "unknown variant $variant; choose math, reward or tool_use" >&2 && exit 2 ;;
esac

out="${OUT:-outputs/arithmetic-$variant}"
mkdir -p "$out"
model="$(python "$here/problems.py" "$out")"
furlong train --config "$here/config.yaml" --hf-checkpoint "$model" --prompt-data "$out/problems.jsonl" \
  --eval-prompt-data held_out "$out/held_out.jsonl" --num-rollout 10 --output-dir "$out" "${score[@]}" "$@"
