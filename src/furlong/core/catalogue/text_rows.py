"""Texts: chat templates, ends of responses, tools, data, rewards."""

from __future__ import annotations

from furlong.core.catalogue.row import MD, MQ, SD, SQ, ST, Row

ROWS = (
    Row(
        "TPL01",
        "prompts are templated twice, or not at all",
        "P",
        "error",
        symptom="Gradients explode; a double chat template; answers that ignore the question.",
        cause="The data already holds the model's special tokens and --apply-chat-template adds them again; or it "
        "holds messages, which need a template.",
        checked="The first prompts: special tokens of the tokenizer in them against --apply-chat-template.",
        remedy="Remove --apply-chat-template for prompts that are templated; add it for messages and plain questions.",
        guides=(MQ, MD, SQ),
    ),
    Row(
        "TPL02",
        "the chat template rewrites history",
        "P",
        "error",
        symptom="In several turns the tokens trained on are not those that were generated.",
        cause="The template renders earlier turns differently once later ones follow, for example by dropping their "
        "thinking.",
        checked="Every prefix of a conversation renders to a prefix of the whole.",
        remedy="`furlong template check` shows the turn and the first characters that differ; use a template that "
        "keeps history.",
        guides=(MD,),
    ),
    Row(
        "TPL03",
        "the model finds its own answers unlikely",
        "R",
        "warning",
        symptom="Log-probs of about -0.8 per token or lower at step 1, from an instruct model.",
        cause="The prompts do not have the chat format that the model was trained on.",
        checked="Mean negative log-prob per response token under the trainer at the first step.",
        remedy="Check --apply-chat-template and run `furlong template check`; of a model that knows no chat format, "
        "take the instruct version.",
        guides=(MD, SD),
    ),
    Row(
        "STOP01",
        "generation does not stop where a turn ends",
        "P",
        "error",
        symptom="Generation is endless, or always runs to the length limit.",
        cause="The token that ends a turn in the chat template is not among those that end generation.",
        checked="The chat template's end of turn, the tokenizer's eos, generation_config's eos and the --rollout-stop "
        "flags.",
        remedy="Give the token with --rollout-stop-token-ids, or its text with --rollout-stop TEXT.",
        guides=(MQ, SQ),
    ),
    Row(
        "STOP02",
        "responses do not end",
        "RX",
        "warning",
        symptom="Engines are busy for long and nothing comes out.",
        cause="Stop tokens are wrong, or the length limit is far above or below what the answers need.",
        checked="Nine in ten of the first responses are cut off, or none has ended after a time.",
        remedy="Give --rollout-stop-token-ids, or change --rollout-max-response-len.",
        guides=(MQ, SQ),
    ),
    Row(
        "TOOL01",
        "tool output is in the loss",
        "PR",
        "error",
        symptom="The model learns to write what tools answer.",
        cause="A custom generate function appends the environment's tokens with a loss mask of ones.",
        checked="A custom generate function for calls that mask them; samples with tokens of the environment whose "
        "loss mask is all ones.",
        remedy="sample.append_response_tokens(tokens, trainable=False) for what the environment says, or zeros for it "
        "in sample.loss_mask.",
        guides=(ST,),
    ),
    Row(
        "TOOL02",
        "conversations outgrow the context",
        "R",
        "warning",
        symptom="Out of memory or cut-off answers in runs of several turns.",
        cause="History grows with each turn.",
        checked="The share of samples ended by the context's length, by turn.",
        remedy="Keep fewer turns in the generate function, or raise --rollout-max-context-len "
        "(--sglang-context-length).",
        guides=(SQ, ST),
    ),
    Row(
        "DATA01",
        "a row lacks what a flag names",
        "P",
        "error",
        symptom="KeyError or a missing field while reading prompts.",
        cause="A key is spelled differently in the data, or some rows have another form.",
        checked="The first rows and a sample of the others: --input-key, --label-key, --tool-key, --metadata-key and "
        "the types of their values.",
        remedy="Name the right key; the message shows the line and the keys it has. --skip-bad-rows passes over them.",
        guides=(ST,),
    ),
    Row(
        "DATA02",
        "prompts or labels are empty",
        "P",
        "error",
        symptom="Samples without a question or without an answer to compare with.",
        cause="Rows were exported with empty fields.",
        checked="The same rows: prompts and labels that are empty, with their line numbers.",
        remedy="Mend the rows, or pass over them with --skip-bad-rows.",
        guides=(ST,),
    ),
    Row(
        "DATA03",
        "training waits for data",
        "R",
        "warning",
        symptom="Devices idle while prompts are read.",
        cause="Reading and encoding of prompts is slower than the step.",
        checked="The share of a step spent waiting for data.",
        remedy="--num-data-workers, --streaming-data, or `furlong data tokenize` beforehand.",
        guides=(ST,),
    ),
    Row(
        "DATA04",
        "prompts are longer than the limit",
        "P",
        "error",
        symptom="Prompts are dropped, or responses are cut at once.",
        cause="The context is smaller than the data needs.",
        checked="Token counts of prompts against --rollout-max-prompt-len and the context length.",
        remedy="Raise --rollout-max-prompt-len or --rollout-max-context-len, up to what the model was made for.",
    ),
    Row(
        "REW01",
        "the reward function fails",
        "P",
        "error",
        symptom="The reward function raises, hangs, or returns something that is no reward.",
        cause="It does not handle the data's labels or a response that has no answer.",
        checked="It is imported, its signature compared, and it is called on a row of the data: with its label as the "
        "response, and with a wrong one.",
        remedy="The message has the traceback, the value or the type; try changes with `furlong reward test`.",
        guides=(ST,),
    ),
    Row(
        "REW02",
        "rewards say nothing",
        "R",
        "warning",
        symptom="The reward drops to 0 or stays there; nothing is learned.",
        cause="All samples of a group, or of a rollout, score the same: the parser never matches, the label is wrong, "
        "or the task is too hard or too easy.",
        checked="Fractions of groups that are all 0, all 1, or without spread; with one sample a prompt, or an "
        "algorithm without groups, the range of all rewards; parser failures; labels never matched.",
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
        cause="The function or its server raised or timed out; such a sample is never averaged.",
        checked="Outcomes of every reward call: scored, failed, timed out.",
        remedy="The message has the most frequent reason; raise --reward-timeout or mend the function.",
    ),
    Row(
        "REW04",
        "rewards are what a step waits for",
        "R",
        "warning",
        symptom="Steps take long though generation is over soon; engines idle, and so do trainers.",
        cause="What scores is slow, or scores too few samples at a time.",
        checked="The seconds of each rollout in which nothing was generated and a reward was not there yet "
        "(perf/reward_wait_time), against the rollout's; that training waits for rollouts.",
        remedy="More --num-reward-workers for what computes, an `async def` function for what waits; a lower "
        "--reward-timeout where calls never end; --async-buffer-size to score while training.",
    ),
)
