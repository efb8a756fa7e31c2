"""What flags of slime are called in other programs, for those who come from there."""

from __future__ import annotations

_NAMES = {
    "--hf-checkpoint": "--model --model-path --model-name-or-path --base-model --pretrain --pretrained-model",
    "--prompt-data": "--dataset --data --data-path --dataset-name --train-file --train-data --train-files",
    "--lr": "--learning-rate",
    "--lr-warmup-iters": "--warmup-steps",
    "--lr-decay-style": "--lr-scheduler-type --lr-scheduler",
    "--clip-grad": "--max-grad-norm --grad-clip --gradient-clipping",
    "--num-epoch": "--epochs --num-epochs --num-train-epochs",
    "--num-rollout": "--max-steps --steps --num-steps --total-steps --iterations",
    "--n-samples-per-prompt": "--num-generations --num-samples --group-size --rollout-n",
    "--rollout-batch-size": "--batch-size --train-batch-size --num-prompts",
    "--micro-batch-size": "--per-device-train-batch-size --per-device-batch-size",
    "--global-batch-size": "--gradient-accumulation-steps --mini-batch-size --ppo-mini-batch-size",
    "--rollout-temperature": "--temperature",
    "--rollout-top-p": "--top-p",
    "--rollout-top-k": "--top-k",
    "--rollout-max-response-len": "--max-new-tokens --max-completion-length --max-response-length --max-tokens "
    "--max-response-len",
    "--rollout-max-prompt-len": "--max-prompt-length --max-prompt-len",
    "--kl-loss-coef": "--beta --kl-beta",
    "--advantage-estimator": "--algorithm --algo --adv-estimator --loss-algorithm",
    "--custom-rm-path": "--reward --reward-func --reward-funcs --reward-fn --reward-function",
    "--save-interval": "--save-steps --save-freq --save-every",
    "--eval-interval": "--eval-steps --eval-freq --eval-every",
    "--load": "--resume --resume-from --resume-from-checkpoint",
    "--output-dir": "--output --out --out-dir --output-path --run-dir",
    "--use-wandb": "--wandb --report-to",
    "--recompute-activations": "--activation-checkpointing",
    "--lora-rank": "--use-lora --use-peft --peft --peft-config --qlora --load-in-4bit --load-in-8bit",  # refused
}
HERE = {name: flag for flag, names in _NAMES.items() for name in names.split()}
