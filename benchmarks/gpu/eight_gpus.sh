#!/usr/bin/env bash
# The three tables of "Eight GPUs" in docs/internals/benchmarks.md: bash eight_gpus.sh training|steps|scaling
set -eu
here=$(dirname "$0")
memory="--recompute-activations --offload-optimizer-states"
ep8="--train-backend megatron --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --grad-reduce-in-bf16"

train() { # 12 micro-batches per GPU, about as many as a step of `steps` has
  PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python "$here/train_scaling.py" --tokens 4096 8192 \
    --routing real balanced --micro-batches 12 --limit 600 "$@"
}
step() { # 64 x 8 samples of 512 + 1,024 tokens
  python "$here/grpo_step.py" --steps 4 --timeout 3000 "$@"
}

case ${1:-} in
training)
  train --shapes 30b-a3b --ways fsdp8 ep8 ep4dp2 --json moe.json
  train --shapes 30b-a3b --ways ep8 --json moe-bf16.json -- --grad-reduce-in-bf16
  train --shapes 8b --ways fsdp8 dp8 tp2dp4 --json dense.json
  ;;
steps)
  step --shape 30b-a3b --max-tokens 8192 --gpus 8 -- $ep8 $memory --rollout-num-gpus-per-engine 2
  step --shape 30b-a3b --max-tokens 8192 --gpus 8 -- $ep8 $memory --rollout-num-gpus-per-engine 8 --sglang-ep-size 8
  step --shape 30b-a3b --max-tokens 8192 --gpus 8 4+4 -- $memory --rollout-num-gpus-per-engine 2 # 4+4 needs H200s
  step --shape 8b --gpus 8 4+4
  ;;
scaling)
  step --shape 1.7b --prompts 256 --prompt-len 128 --new 400 --steps 8 --gpus 1 2 4 8
  ;;
*)
  echo "usage: eight_gpus.sh training|steps|scaling" >&2
  exit 2
  ;;
esac
