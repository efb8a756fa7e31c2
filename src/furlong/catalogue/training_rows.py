"""Training: text, rewards and the numerics of a step."""

from __future__ import annotations

from furlong.catalogue.row import MD, MQ, SD, SQ, ST, Row

ROWS = (
    Row(
        "TPL01",
        "chat template applied twice, or not at all",
        "PX",
        "error",
        symptom="Gradients explode; a double chat template; answers that ignore the question.",
        cause="The data already contains the model's special tokens and --apply-chat-template adds them again; or it "
        "contains messages, which need a template.",
        checked="The first prompts: special tokens of the tokenizer in them against --apply-chat-template; whether the "
        "template starts the answer.",
        remedy="Remove --apply-chat-template for prompts that are already rendered; add it for messages and plain "
        "questions.",
        guides=(MQ, MD, SQ),
    ),
    Row(
        "TPL02",
        "the chat template rewrites history",
        "P",
        "error",
        symptom="In multi-turn runs the trained tokens are not those that were generated.",
        cause="The template renders earlier turns differently once later turns follow, for example by dropping their "
        "thinking.",
        checked="Every prefix of a conversation renders to a prefix of the whole.",
        remedy="`furlong template check` shows the turn and the first characters that differ; use a template that "
        "keeps history.",
        guides=(MD,),
    ),
    Row(
        "TPL03",
        "log-probs near chance",
        "R",
        "warning",
        symptom="Log-probs of about -0.8 per token or lower at step 1, with a large instruct model.",
        cause="The prompts do not have the chat format that the model was trained on, or its weights are damaged.",
        checked="Mean log-prob per response token under the trainer at the first step, against chance "
        "(-ln of the vocabulary size); small and base models are less certain than large instruct models.",
        remedy="Check --apply-chat-template and run `furlong template check`; read the weights with `furlong check`. "
        "If the model knows no chat format, use its instruct version.",
        guides=(MD, SD),
    ),
    Row(
        "STOP01",
        "generation does not stop at the end of a turn",
        "P",
        "error",
        symptom="Generation is endless, or always runs to the length limit.",
        cause="The token that ends a turn in the chat template is not a stop token.",
        checked="The chat template's end of turn, the tokenizer's eos, generation_config's eos and the --rollout-stop "
        "flags.",
        remedy="Add the token with --rollout-stop-token-ids, or its text with --rollout-stop TEXT.",
        guides=(MQ, SQ),
    ),
    Row(
        "STOP02",
        "responses do not end",
        "RX",
        "warning",
        symptom="Engines are busy for a long time and no response arrives.",
        cause="Stop tokens are wrong, or the length limit is far above or below what the answers need.",
        checked="Nine in ten of the first responses are truncated, or none has ended after some time.",
        remedy="Set --rollout-stop-token-ids, or change --rollout-max-response-len.",
        guides=(MQ, SQ),
    ),
    Row(
        "TOOL01",
        "tool output is in the loss",
        "PR",
        "error",
        symptom="The model learns to write tool output.",
        cause="A custom generate function appends the environment's tokens with a loss mask of ones.",
        checked="Whether a custom generate function masks such tokens; samples with tokens of the environment whose "
        "loss mask is all ones.",
        remedy="Append the environment's tokens with sample.append_response_tokens(tokens=ids, text=text, "
        "trainable=False), or set zeros for them in sample.loss_mask.",
        guides=(ST,),
    ),
    Row(
        "TOOL02",
        "conversations outgrow the context",
        "RX",
        "warning",
        symptom="Out of memory or truncated answers in multi-turn runs.",
        cause="History grows with each turn.",
        checked="The fraction of samples ended by the context length, by turn.",
        remedy="Keep fewer turns (--max-turns limits those of agents), or raise --rollout-max-context-len (and "
        "--sglang-context-length, if set).",
        guides=(SQ, ST),
    ),
    Row(
        "DATA01",
        "a row lacks a key that a flag names",
        "P",
        "error",
        symptom="KeyError or a missing field while reading prompts.",
        cause="A key is spelled differently in the data, or some rows have another format.",
        checked="The first rows and a sample of the others: --input-key, --label-key, --tool-key, --metadata-key and "
        "the types of their values.",
        remedy="Set the right key; the message shows the line and its keys. --skip-bad-rows skips such rows.",
        guides=(ST,),
    ),
    Row(
        "DATA02",
        "empty prompts or labels",
        "P",
        "error",
        symptom="Samples without a question or without a reference answer.",
        cause="Rows were exported with empty fields.",
        checked="The same rows: empty prompts and labels, with their line numbers.",
        remedy="Fix the rows, or skip them with --skip-bad-rows.",
        guides=(ST,),
    ),
    Row(
        "DATA03",
        "training waits for data",
        "R",
        "warning",
        symptom="Devices idle while prompts are read.",
        cause="Reading and tokenizing prompts is slower than the training step.",
        checked="The fraction of a step spent waiting for data.",
        remedy="--num-data-workers, --streaming-data, or `furlong data tokenize` beforehand.",
        guides=(ST,),
    ),
    Row(
        "DATA04",
        "prompts exceed the length limit",
        "PX",
        "error",
        symptom="Prompts are dropped, or responses are truncated immediately.",
        cause="The context is smaller than the data needs.",
        checked="Token counts of prompts against --rollout-max-prompt-len and the context length.",
        remedy="Raise --rollout-max-prompt-len or --rollout-max-context-len, up to the model's context length.",
    ),
    Row(
        "REW01",
        "the reward function fails",
        "P",
        "error",
        symptom="The reward function raises, hangs, or returns an invalid reward.",
        cause="It does not handle the labels in the data, or a response without an answer; or its server or process "
        "failed.",
        checked="It is imported, its signature checked, and it is called on a row of the data: with the label as the "
        "response, with the label and the model's end of turn, and with a wrong response.",
        remedy="The message has the traceback, the value or the type; test changes with `furlong reward test`.",
        guides=(ST,),
    ),
    Row(
        "REW02",
        "rewards carry no signal",
        "R",
        "warning",
        symptom="The reward drops to 0 or stays there; nothing is learned.",
        cause="All samples of a group, or of a rollout, score the same: the parser never matches, the label is wrong, "
        "or the task is too hard or too easy.",
        checked="Fractions of groups that are all 0, all 1, or without variance; with one sample per prompt, or an "
        "algorithm without groups, the range of all rewards; parser failures; labels that never match.",
        remedy="Check --label-key and `furlong reward test`; --kl-loss-coef, --n-samples-per-prompt, "
        "--dynamic-sampling-filter-path.",
        guides=(MD, ST),
    ),
    Row(
        "REW03",
        "reward calls fail",
        "RX",
        "warning",
        symptom="Failed calls look like rewards of 0.",
        cause="The function or its server raised or timed out; failed samples are excluded from averages.",
        checked="Outcomes of every reward call: scored, failed, timed out.",
        remedy="The message has the most frequent reason; raise --reward-timeout or fix the function.",
    ),
    Row(
        "REW04",
        "rewards are the bottleneck",
        "R",
        "warning",
        symptom="Steps take long although generation ends early; engines and trainers are idle.",
        cause="The reward function is slow, or scores too few samples at a time.",
        checked="The seconds of each rollout without generation in which a reward was pending "
        "(perf/reward_wait_time), against the length of the rollout; that training waits for rollouts.",
        remedy="More --num-reward-workers for computation, an `async def` function for waiting; a lower "
        "--reward-timeout if calls hang; --async-buffer-size to score during training.",
    ),
    Row(
        "REW05",
        "signs of reward hacking",
        "R",
        "warning",
        symptom="Rewards rise; the answers get worse.",
        cause="Candidates: a reward that takes a missing answer for a right one; checks that run in the process of the "
        "code under test, so that its exit ends them; a reward for brevity, where this is intended.",
        checked="Samples with the highest reward of a rollout whose text is empty, or calls `os._exit`, if nearly all "
        "such samples have that reward and others have less.",
        remedy="Read such samples with `furlong view`, and pass one to `furlong reward test`. For code, compare "
        "outputs outside of the sandbox (docs: What a policy can and cannot reach).",
    ),
    Row(
        "NUM01",
        "policy and reference differ at the first step",
        "PR",
        "error",
        symptom="KL is not 0 at step 1.",
        cause="Actor and reference have the same weights at that point: below 1e-4 the difference is kernel noise, "
        "above 1 a wrong --ref-load or precision.",
        checked="The tokenizer of --ref-load against that of --hf-checkpoint; then log-probs of the policy against "
        "those of the reference at step 0: equal, below 1e-4, above, above 1.",
        remedy="Check --ref-load; then precision (--fp32), parallel sizes, and with --train-backend megatron "
        "--attention-backend flash.",
        guides=(MD, SD),
    ),
    Row(
        "NUM02",
        "engine and trainer disagree on log-probs",
        "R",
        "error",
        symptom="The log-probs of training and rollout drift apart.",
        cause="Stale weights, another dtype or kernel, a transform of the sampling distribution, or different expert "
        "routing.",
        checked="The difference per token at step 0 and after each weight update (forward_logp_max_diff, mean, 99th "
        "percentile), and the share of each cause.",
        remedy="The message names the cause; --use-tis corrects a difference that cannot be removed.",
        guides=(MD,),
    ),
    Row(
        "NUM03",
        "gradient spike",
        "R",
        "warning",
        symptom="A large gradient norm at step 1 or later.",
        cause="The data or chat template does not fit the model, rewards are large, or the reward reads a wrong key.",
        checked="grad_norm against a running scale; with one step per rollout ppo_kl must be 0.",
        remedy="Check the template with `furlong template check`, the reward with `furlong reward test`, and "
        "--label-key; scale rewards to the range 0 to 1; later in a run lower --lr or --clip-grad. "
        "slime's guides also name --moe-permute-fusion, which has no effect here.",
        guides=(MQ, MD, SQ, SD),
    ),
    Row(
        "NUM04",
        "loss or gradient is not finite",
        "RX",
        "error",
        symptom="Loss or gradient becomes NaN or Inf.",
        cause="The learning rate is too high, activations overflow in float16 or FP8, or a sample or the chat template "
        "does not fit the model.",
        checked="Loss and gradients of every step; a step that is not finite is rejected, with its micro-batch and "
        "samples.",
        remedy="Lower --lr or --clip-grad, use --bf16, look at the sample; --no-check-for-nan-in-loss-and-grad skips "
        "and counts such steps.",
        guides=(MQ, MD, SQ, ST),
    ),
    Row(
        "NUM05",
        "engine and trainer route experts differently",
        "R",
        "warning",
        symptom="A mixture-of-experts model collapses after tens of steps.",
        cause="Small numerical differences select other experts, so the trained model differs from the one that "
        "generates.",
        checked="The fraction of the engine's expert choices that the trainer shares, if the engine reports them.",
        remedy="Add --use-rollout-routing-replay; if many tokens differ from the first step on, first compare the "
        "routers' weights on both sides.",
        guides=(MD,),
    ),
    Row(
        "NUM06",
        "training changes nothing",
        "R",
        "warning",
        symptom="The run looks healthy, but neither reward nor weights move.",
        cause="Candidates: every token is masked, the learning rate is 0, --adam-eps is far above the gradients, or a "
        "custom loss or advantage function returns a constant or detaches its tensors.",
        checked="For eight steps in which rewards differ: grad_norm is 0, or weight updates change no tensor.",
        remedy="Check --lr and its schedule, --adam-eps (1e-8), the loss masks of custom functions, and custom loss "
        "and advantage functions.",
    ),
    Row(
        "NUM07",
        "the critic is of no use",
        "PR",
        "warning",
        symptom="PPO learns slowly or not at all; values do not follow the returns, or grow without bound.",
        cause="The critic's learning rate is too low or too high, it is trained too rarely, or nothing in the tokens "
        "tells the outcome; or --critic-load has another tokenizer.",
        checked="The tokenizer of --critic-load against that of --hf-checkpoint; the explained variance, "
        "on average over 32 rollouts; the critic's loss against its median.",
        remedy="Raise --critic-lr or --num-critic-only-steps; start from a trained critic with --critic-load; or use "
        "an estimator without a critic, such as --advantage-estimator grpo.",
    ),
    Row(
        "NUM08",
        "value warm-up too short",
        "R",
        "warning",
        symptom="The first updates of the policy are noise.",
        cause="The critic has seen too few rollouts: its head is new, or that of --critic-load learned other rewards.",
        checked="The explained variance in the first rollout that trains the policy.",
        remedy="Raise --num-critic-only-steps or --critic-lr, or start from a critic of this task with --critic-load.",
    ),
    Row(
        "OPD01",
        "the teacher reads other texts than the policy",
        "PR",
        "error",
        symptom="Distillation makes the policy worse, or its KL is huge.",
        cause="Candidates: the teacher has another vocabulary, or expects another chat template; or it was asked at "
        "another temperature or for other tokens.",
        checked="The tokenizer of --opd-teacher-load against that of --hf-checkpoint, and the sizes of both models; "
        "the teacher's log-probs of the first responses: those of random tokens, or lower.",
        remedy="Use a teacher with the tokenizer of --hf-checkpoint, and the chat template that it was trained on.",
    ),
    Row(
        "OPD02",
        "the teacher is the policy",
        "R",
        "warning",
        symptom="train/opd_reverse_kl is 0, and distillation changes nothing.",
        cause="The teacher has the policy's weights: --opd-teacher-load names them or another --opd-teacher-ckpt-step, "
        "a server has not loaded the teacher, or the policy was started from the teacher (--load, --ref-load).",
        checked="The KL to the teacher before the first update is 0.",
        remedy="Check the teacher's folder or server, and --load and --ref-load.",
    ),
    Row(
        "OPD03",
        "the KL to the teacher does not fall",
        "R",
        "warning",
        symptom="train/opd_reverse_kl stays where it began.",
        cause="Candidates: the learning rate or --opd-kl-coef is too low, rewards pull the other way, the samples are "
        "too old, or the teacher knows something that the policy does not see, such as a privileged prompt.",
        checked="The KL of the last 16 of 64 rollouts against that of the first 16.",
        remedy="Raise --lr or --opd-kl-coef; lower --opd-task-reward-coef; use --opd-loss topk or full, with less "
        "variance.",
    ),
    Row(
        "OPD04",
        "the teacher's log-probs have another temperature",
        "P",
        "warning",
        symptom="The KL to the teacher does not fall below a constant.",
        cause="SGLang's log-probs of given tokens have temperature 1, whatever the request says; the policy's have "
        "--rollout-temperature.",
        checked="--rollout-temperature is not 1, and the teacher is a server other than `furlong serve`.",
        remedy="Use --rollout-temperature 1, `furlong serve`, a teacher in this process (NAME=FOLDER) or --opd-type "
        "trainer.",
    ),
)
