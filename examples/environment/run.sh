#!/usr/bin/env bash
# An environment of your own (cash_register.py): a class with a state, and a loop that lets the policy act in it.
#
#   bash examples/environment/run.sh   # about a minute on a CPU; any flag of `furlong train` can follow
#
# Output goes to $OUT (default: outputs/environment), which must not contain a run yet.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
out="${OUT:-outputs/environment}"

model="$(python "$here/../sums.py" "$out")"
for seed in $(seq 2000); do  # a row is an episode: its prompt and metadata are the initial state of the environment
  echo "{\"prompt\": \"$((10 + seed * 7 % 20))+$((10 + seed * 3 % 20))=\", \"metadata\": {\"seed\": $seed}}"
done > "$out/episodes.jsonl"

furlong train --hf-checkpoint "$model" --prompt-data "$out/episodes.jsonl" --input-key prompt \
  --custom-generate-function-path "$here/cash_register.py:generate" --rollout-max-response-len 48 \
  --rollout-batch-size 32 --n-samples-per-prompt 8 --num-rollout 40 --lr 4e-4 \
  --use-dynamic-batch-size --max-tokens-per-gpu 8192 --output-dir "$out" "$@"
