"""Mistakes that people make at the terminal, and the remedy that each message names."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from furlong.config.command_line import examine
from furlong.run.launch import findings_before_run
from runs import write_prompts

# A word of the command and what is written instead, or words that are added, and a part of the message with the remedy.
MISTAKES = [
    # misspelled flags
    ("--learning-rate 1e-5", "use --lr"),
    ("--learning_rate 1e-5", "use --lr"),
    ("--n_samples_per_prompt 4", "did you mean --n-samples-per-prompt?"),
    ("--rollout-batchsize 4", "did you mean --rollout-batch-size?"),
    ("--KL-loss-coef 0.1", "did you mean --kl-loss-coef?"),
    ("-lr 1e-5", "did you mean --lr 1e-5?"),
    ("–lr 1e-5", "did you mean --lr 1e-5?"),
    ("lr=1e-5", "did you mean --lr 1e-5?"),
    ("--no-colocate", "remove --no-colocate"),
    # names of other programs
    ("--model Qwen/Qwen3-0.6B", "use --hf-checkpoint"),
    ("--per-device-train-batch-size 4", "use --micro-batch-size"),
    ("--num-generations 4", "use --n-samples-per-prompt"),
    ("--num-gpus 2", "use --actor-num-gpus-per-node"),
    ("--report-to wandb", "use --use-wandb"),
    ("--trainer ray", "use --train-backend"),
    ("--callbacks Stop", "furlong.train(on_step=FUNCTION)"),
    ("actor_rollout_ref.actor.optim.lr=1e-6", "use --lr"),
    ("+trainer.total_epochs=3", "use --num-epoch"),
    ("--lora-rank 8", "all weights are trained"),
    ("--fp16", "use --bf16"),
    ("--push-to-hub", "hf upload OWNER/NAME"),
    ("--device cuda:1", "CUDA_VISIBLE_DEVICES"),
    ("--dry-run", "run `furlong doctor` with the same flags"),
    ("--logging-steps 10", "remove it"),
    ("--scale-rewards none", "use --disable-grpo-std-normalization for 'none'"),
    ("--mask-truncated-completions", "use --mask-truncated"),
    ("--importance-sampling-level sequence", "use --advantage-estimator gspo"),
    ("--log-completions", "use --debug-rollout-print-every"),
    ("--generation-kwargs {}", "use flags such as --rollout-stop"),
    ("--sync-ref-model", "use --ref-update-interval"),
    ("--repetition-penalty 1.1", "penalize repetition in the reward"),
    ("--vllm-mode colocate", "use --engine"),
    ("--beta 0.04", "use --use-kl-loss with --kl-loss-coef BETA"),
    ("--loss-type sft", "use sft_loss"),
    ("--loss-type grpo", "use --advantage-estimator grpo"),
    ("--save-total-limit 3", "use --keep-checkpoints"),
    ("--verbose", "use --log-level"),
    ("--actor_learning_rate 5e-7", "use --lr"),
    ("--vllm_num_engines 2", "use --rollout-num-gpus"),
    ("--num_episodes 1", "use --num-epoch"),
    ("--packing_samples", "sequences are packed"),
    ("--max_samples 1000", "write 'FILE@[:N]'"),
    ("--load_checkpoint", "use --load"),
    ("--system-prompt 'Think.'", "as a message with the role system"),
    ("--max_epochs 1", "or repeat the data with --num-epoch"),
    ("--remote_rm_url ./rm.py", "or --custom-rm-path FILE.py:NAME"),
    ("--zero_stage 3", "shards as ZeRO-3 does"),
    ("+actor_rollout_ref.actor.fsdp_config.param_offload=True", "use --offload-train"),
    ("trainer.val_before_train=True", "use --skip-eval-before-train for False"),
    ("critic.optim.ppo_epochs=2", "split it with --num-steps-per-rollout"),
    ("actor_rollout_ref.actor.optim.lr_warmup_iters=2", "use --lr-warmup-iters"),
    ("actor_rollout_ref.rollout.enforce_eager=True", "an option of vLLM"),
    ("actor_rollout_ref.rollout.val_kwargs.n=4", "use --n-samples-per-eval-prompt"),
    # words that a shell or an editor changed, or that stand alone
    ("run.yaml", "did you mean --config run.yaml?"),
    ("rewards.py:digits", "did you mean --custom-rm-path rewards.py:digits?"),
    ("more.jsonl@[:5]", "did you mean --prompt-data more.jsonl@[:5]?"),
    ("--prompt-data gsm8k", "or write OWNER/NAME:SPLIT for a data set on the Hub"),
    ("''", "an unset shell variable"),
    ("' '", "delete what follows it"),
    ("'\r'", "sed -i 's/\\r$//' SCRIPT"),
    ("' #' the tiny one", "delete what follows it"),
    ("--prompt-data my data.jsonl", "write --prompt-data 'my data.jsonl'"),
    ("--hf-checkpoint bare", "AutoTokenizer.from_pretrained(MODEL).save_pretrained('bare')"),
    ("“--lr” 1e-4", "write --lr"),
    ("--lr\u00a01e-5", "write --lr 1e-5"),
    ("--hf-checkpoint=~/qwen", "write the whole path"),
    ("--prompt-data '$DATA/prompts.jsonl'", "write the whole path"),
    ("--prompt-data prompts.jsonl more.jsonl", "join several into one"),
    ("--prompt-data '*.jsonl'", "join the files into one, `cat *.jsonl > all.jsonl`"),
    ("--prompt-data shards", "data_files='shards/*.parquet', split='train').to_parquet('all.parquet')"),
    # values
    ("--lr", "write --lr VALUE"),
    ("--lr = 1e-5", "write --lr 1e-5"),
    ("--lr 1e-5,", "write 1e-5"),
    ("--lr 0,0001", "write 0.0001"),
    ("--lr -1e-5", "use a value of at least 0"),
    ("--lr 1e5", "at least 0 and at most 10"),
    ("--num-rollout 1e3", "write 1000"),
    ("--rollout-batch-size 0", "missing, or 0"),
    ("--num-rollout 1,000", "write 1000"),
    ("--rollout-max-response-len 8k", "write 8000"),
    ("--num-rollout ten", "expected an integer"),
    ("--bf16 true", "write --bf16 alone"),
    ("--use-wandb=False", "remove --use-wandb"),
    ("--advantage-estimator GRPO", "did you mean grpo?"),
    ("--advantage-estimator gae", "use ppo"),
    ("--advantage-estimator reinforce++", "use reinforce_plus_plus"),
    ("--num-critic-only-steps 3", "remove --num-critic-only-steps"),
    ("--return-level turn", "remove --return-level"),
    ("--engine vllm", "use sglang, or embedded"),
    ("--rm-type gqpa", "did you mean gpqa?"),
    ("--rollout-temperature 0", "use a value above 0"),
    ("--global-batch-size 7", "--global-batch-size 8 --num-steps-per-rollout 2"),
    ("--n-samples-per-prompt 1", "use --n-samples-per-prompt 2 or more"),
    # files and functions
    ("--hf-checkpoint modle", "did you mean model?"),
    ("--hf-checkpoint prompts.jsonl", "give the directory that contains config.json"),
    ("--hf-checkpoint https://huggingface.co/Qwen/Qwen3-0.6B/tree/main", "write the name, Qwen/Qwen3-0.6B,"),
    ("--hf-checkpoint qwen3", "OWNER/NAME"),
    (
        "--prompt-data table.csv",
        "__import__('pandas').read_csv('table.csv').to_json('table.jsonl', orient='records', lines=True)",
    ),
    ("--prompt-data array.json", "jq -c '.[]' array.json > array.jsonl"),
    ("--label-key metadata.level", "the row has ['input', 'label']"),
    ("--eval-prompt-data test:prompts.jsonl", "write test prompts.jsonl"),
    ("--eval-prompt-data prompts.jsonl prompts.jsonl", "write NAME FILE for each set"),
    ("--rm-type rewards.py:digits", "use --custom-rm-path rewards.py:digits"),
    ("--custom-rm-path math", "use --rm-type math"),
    ("--prompt-data model", "the model to --hf-checkpoint"),
    ("--prompt-data prompts.json", "did you mean prompts.jsonl?"),
    ("--prompt-data prompts.jsonl[:4]", "write 'prompts.jsonl@[:4]'"),
    ("--eval-prompt-data a prompts.jsonl b", "give every file a name"),
    ("--config run.yml", "check the path"),
    ("--custom-rm-path checks.py:digits", "check the path"),
    ("--label-key lable", "--label-key label"),
    ("--custom-rm-path rewards.py", "write rewards.py:digits"),
    ("--custom-rm-path rewards.py:digit", "did you mean digits?"),
    ("--custom-rm-path rewards.py:Scorer", "name an instance of it"),
    ("--custom-rm-path rewards.py::digits", "write rewards.py:digits"),
]


def test_each_mistake_has_one_message_with_the_remedy(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").symlink_to(model)
    write_prompts(Path("prompts.jsonl"), 8)
    write_prompts(Path("my data.jsonl"), 8)
    shutil.copytree(model, "bare", ignore=shutil.ignore_patterns("token*"))
    Path("shards").mkdir()
    Path("shards/0.parquet").touch()
    Path("table.csv").write_text("input,label\n1,1\n")
    Path("array.json").write_text('[{"input": "1", "label": "1"}]')
    Path("rewards.py").write_text("def digits(args, sample, **kwargs):\n    return 1.0\n\n\nclass Scorer:\n    pass\n")
    base = "--hf-checkpoint model --prompt-data prompts.jsonl --label-key label --num-rollout 1 --rollout-batch-size 2"
    wrong: list[object] = []
    for words, remedy in MISTAKES:
        reward = "" if "--custom-rm-path" in words or "--rm-type" in words else "--rm-type random"
        resolved, problems = examine(shlex.split(f"{base} {reward} {words}"))
        errors = [found.text() for found in findings_before_run(resolved, problems) if found.severity == "error"]
        if len(errors) != 1 or remedy not in " ".join(errors[0].split()):
            wrong.append((words, remedy, errors))
    assert wrong == []
