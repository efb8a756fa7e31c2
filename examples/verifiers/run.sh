#!/usr/bin/env bash
# A taskset of verifiers (V1) as the environment, unmodified (digit_sums.py): its tasks, its harness and its rewards.
#
#   pip install 'furlong-rl[verifiers]' uv && bash examples/verifiers/run.sh   # two minutes on a CPU; any flag can follow
#
# The harness is a program that verifiers starts with uv, once for each of the 16 episodes.
# Watch `reward/digits`. The model knows sums, not chats, so examples/code/plain.jinja shows it nothing but the task.
# Output goes to $OUT (default: outputs/verifiers), which must not contain a run yet.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
out="${OUT:-outputs/verifiers}"
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"  # where verifiers finds the taskset by its name

model="$(python "$here/../sums.py" "$out")"
furlong train --hf-checkpoint "$model" --environment "verifiers:digit_sums?harness=null" --prompt-data episodes:2000 \
  --chat-template-path "$here/../code/plain.jinja" --rollout-max-response-len 8 \
  --rollout-batch-size 2 --n-samples-per-prompt 4 --num-rollout 2 --lr 2e-4 --hook-import-timeout 300 --output-dir "$out/run" "$@"
