#!/usr/bin/env bash
# A furlong run on Slurm: training on 4 nodes x 8 GPUs, generation on 2 nodes x 8 GPUs. `sbatch examples/cluster/slurm.sh`
#
# Python with furlong-rl[ray,sglang] is in $VENV on a file system that all nodes share, like model, data and output.
# A job that is requeued, or submitted again, resumes from its last checkpoint.
#SBATCH --job-name=furlong
#SBATCH --nodes=6
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:TERM@300
#SBATCH --output=furlong-%j.log
set -euo pipefail
VENV="${VENV:-/shared/venv}"
SHARED="${SHARED:-/shared}"
PORT="${PORT:-6379}"
source "$VENV/bin/activate"
FURLONG_API_KEY="${FURLONG_API_KEY:-$(openssl rand -hex 32)}"  # of the engines, for this job only
export FURLONG_API_KEY

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head="${nodes[0]}"
address="$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}')"

echo "Ray: head $head ($address:$PORT), ${#nodes[@]} nodes"
srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap \
  ray start --head --block --node-ip-address="$address" --port="$PORT" --num-gpus=8 &
sleep 20
if [ "${#nodes[@]}" -gt 1 ]; then
  srun --nodes="$((${#nodes[@]} - 1))" --ntasks="$((${#nodes[@]} - 1))" --exclude="$head" --overlap \
    ray start --block --address="$address:$PORT" --num-gpus=8 &
fi

# The run waits for all nodes (--placement-timeout). On SIGTERM it ends cleanly, and the job is queued again.
srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap --export=ALL \
  furlong train --ray-address "$address:$PORT" \
  --hf-checkpoint "$SHARED/model" --prompt-data "$SHARED/prompts.jsonl" --label-key label --rm-type math \
  --num-rollout 100 --rollout-batch-size 64 --n-samples-per-prompt 8 --rollout-max-response-len 4096 \
  --actor-num-nodes 4 --actor-num-gpus-per-node 8 \
  --engine sglang --rollout-num-gpus 16 --rollout-num-gpus-per-engine 8 \
  --save "$SHARED/checkpoints" --load "$SHARED/checkpoints" --save-interval 10 --output-dir "$SHARED/run" "$@" &
run=$!
requeue() {
  kill -TERM "$run"
  wait "$run" || true
  scontrol requeue "$SLURM_JOB_ID"
  exit 0
}
trap requeue TERM
wait "$run"
