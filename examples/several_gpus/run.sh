#!/usr/bin/env bash
# Several GPUs of one machine. Needs `pip install 'furlong-rl[ray,sglang]'`.
#
#   bash examples/several_gpus/run.sh plan         # no GPU needed: the memory of each phase on one GPU
#   bash examples/several_gpus/run.sh doctor       # check the command on the machine that will run it
#   bash examples/several_gpus/run.sh train        # any flag of `furlong train` can follow
#
#   MODEL=Qwen3-4B DATA=problems.jsonl LAYOUT=split GPUS=8 bash examples/several_gpus/run.sh train --lr 2e-6
#
# LAYOUT=colocate (default): all GPUs train and generate in turn. LAYOUT=split: half of them train while the other half
# generates the next rollout. LAYOUT=megatron: as colocate, with Megatron-core and tensor parallelism over two GPUs.
set -euo pipefail
model="${MODEL:-Qwen3-4B}"
data="${DATA:-problems.jsonl}"
gpus="${GPUS:-8}"
command="${1:?plan, doctor or train}"
shift

case "${LAYOUT:-colocate}" in
  colocate) layout=(--actor-num-gpus-per-node "$gpus" --colocate) ;;
  split) layout=(--actor-num-gpus-per-node $((gpus / 2)) --rollout-num-gpus $((gpus / 2)) --async-buffer-size 1) ;;
  megatron) layout=(--actor-num-gpus-per-node "$gpus" --colocate --train-backend megatron
    --tensor-model-parallel-size 2 --sequence-parallel) ;;
  *) echo "LAYOUT=$LAYOUT is unknown; use colocate, split or megatron" >&2 && exit 2 ;;
esac
where=()
[ "$command" = plan ] && where=(--device "${DEVICE:-h100}")

furlong "$command" "${where[@]}" --hf-checkpoint "$model" --prompt-data "$data" --input-key question --label-key answer \
  --apply-chat-template --rm-type math --engine sglang "${layout[@]}" \
  --rollout-batch-size 64 --n-samples-per-prompt 8 --rollout-max-prompt-len 1024 --rollout-max-response-len 4096 \
  --use-dynamic-batch-size --max-tokens-per-gpu 32768 --lr 1e-6 --num-rollout 200 \
  --save checkpoints --load checkpoints --save-interval 20 "$@"
