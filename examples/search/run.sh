#!/usr/bin/env bash
# A search agent as an environment (search.py) over a local index: SFT shows how to search, RL teaches that it pays.
#
#   bash examples/search/run.sh   # two minutes on a CPU; any flag of `furlong train` can follow, for the RL run
#
# Watch `reward/exact` and `reward/queries`.
# Output goes to $OUT (default: outputs/search), which must not contain a run yet.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
out="${OUT:-outputs/search}"

model="$(python "$here/make_data.py" "$out")"
steps="${SFT_STEPS:-150}"
furlong train --hf-checkpoint "$model" --prompt-data "$out/demonstrations.jsonl" --input-key prompt \
  --loss-type sft_loss --rollout-batch-size 64 --num-rollout "$steps" \
  --lr 2e-3 --lr-warmup-fraction 0.05 --lr-decay-style linear --use-dynamic-batch-size --max-tokens-per-gpu 8192 \
  --save-hf "$out/sft/hf_{rollout_id}" --save "$out/sft/checkpoints" --save-interval "$steps" --output-dir "$out/sft"

furlong train --hf-checkpoint "$out/sft/hf_$steps" --prompt-data "$out/questions.jsonl" --input-key prompt \
  --label-key label --environment "$here/search.py:Search?index=$out/facts.db" --max-turns 3 \
  --rollout-batch-size 16 --n-samples-per-prompt 8 --num-rollout 40 --rollout-max-response-len 12 --lr 1e-4 \
  --use-dynamic-batch-size --max-tokens-per-gpu 8192 --output-dir "$out/rl" "$@"
