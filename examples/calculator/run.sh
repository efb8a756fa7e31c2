#!/usr/bin/env bash
# One calculator agent in three ways (agent.py, program.py): SFT shows how to ask the calculator, RL teaches when to.
#
#   bash examples/calculator/run.sh            # two minutes on a CPU; any flag of `furlong train` can follow, for RL
#   AGENT=client bash examples/calculator/run.sh
#
# AGENT is `policy` (policy().chat in this process), `client` (an OpenAI client) or `command` (a program).
# Watch `rollout/raw_reward` and `session/turns` (1 without a call, 2 with one).
# Output goes to $OUT (default: outputs/calculator), which must not contain a run yet.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
out="${OUT:-outputs/calculator}"

case "${AGENT:-policy}" in
  policy) agent=(--custom-generate-function-path "$here/agent.py:generate") ;;
  client) agent=(--agent-function-path "$here/agent.py:solve") ;;
  command) agent=(--agent-command "python $here/program.py") ;;
  *) echo "AGENT is $AGENT; set it to policy, client or command" >&2; exit 2 ;;
esac
model="$(python "$here/../sums.py" "$out")"
python "$here/demonstrations.py" "$out/demonstrations.jsonl"
steps="${SFT_STEPS:-150}"
furlong train --hf-checkpoint "$model" --prompt-data "$out/demonstrations.jsonl" --input-key prompt \
  --loss-type sft_loss --rollout-batch-size 64 --num-rollout "$steps" \
  --lr 2e-3 --lr-warmup-fraction 0.05 --lr-decay-style linear --use-dynamic-batch-size --max-tokens-per-gpu 8192 \
  --save-hf "$out/sft/hf_{rollout_id}" --save "$out/sft/checkpoints" --save-interval "$steps" --output-dir "$out/sft"

furlong train --hf-checkpoint "$out/sft/hf_$steps" --prompt-data "$out/problems.jsonl" --input-key prompt \
  --label-key label "${agent[@]}" --custom-rm-path "$here/reward.py:shaped" --max-turns 3 \
  --rollout-batch-size 16 --n-samples-per-prompt 8 --num-rollout 80 --rollout-max-response-len 8 --lr 1e-4 \
  --use-dynamic-batch-size --max-tokens-per-gpu 8192 --output-dir "$out/rl" "$@"
