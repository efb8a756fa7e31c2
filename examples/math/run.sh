#!/usr/bin/env bash
# Math with a built-in verifier: answers are compared with the label by --rm-type math.
#
#   bash examples/math/run.sh                      # about a minute on a CPU: the quickstart's model and sums
#   bash examples/math/run.sh --num-rollout 80     # more steps; any flag of `furlong train` can follow
#
# Your own model and data, on a GPU (rows with a "question" and an "answer"):
#   MODEL=Qwen3-0.6B DATA=problems.jsonl bash examples/math/run.sh --input-key question --label-key answer \
#     --apply-chat-template --rollout-max-response-len 1024 --lr 1e-6
#
# Output goes to $OUT (default: outputs/math), which must not contain a run yet.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
out="${OUT:-outputs/math}"

model="$(python "$here/../sums.py" "$out")"
evaluation=()
[ -z "${DATA:-}" ] && evaluation=(--eval-prompt-data held_out "$out/held_out.jsonl" --eval-interval 10)

furlong train --config "$here/config.yaml" --hf-checkpoint "${MODEL:-$model}" \
  --prompt-data "${DATA:-$out/problems.jsonl}" --rm-type math --output-dir "$out" "${evaluation[@]}" "$@"
