"""Flags, and the functions that they name."""

from __future__ import annotations

from furlong.core.catalogue.row import MQ, SQ, ST, Row

ROWS = (
    Row(
        "CFG01",
        "inconsistent batch sizes",
        "P",
        "error",
        symptom="Sizes are not divisible, or a rollout has more or fewer samples than its training steps use.",
        cause="rollout_batch_size x n_samples_per_prompt = global_batch_size x num_steps_per_rollout does not hold.",
        checked="That equation, and that micro-batches and data-parallel ranks divide the global batch.",
        remedy="Use one of the nearest valid settings; the message prints three, as flags to paste.",
        guides=(MQ, SQ, ST),
    ),
    Row(
        "CFG02",
        "unknown or ignored flag",
        "P",
        "error",
        symptom="A setting has no effect.",
        cause="The flag is misspelled, is a slime flag that furlong does not support, or requires another flag.",
        checked="Every flag and every key of a file is known, and has an effect with this backend and the other flags.",
        remedy="Use the name that the message suggests, add the required flag, or remove it.",
    ),
    Row(
        "CFG03",
        "asynchronous training with --colocate",
        "P",
        "error",
        symptom="An asynchronous run with --colocate fails or hangs.",
        cause="Colocated training and generation take turns on the same GPUs, so neither can run ahead of the other.",
        checked="--colocate together with --async-buffer-size or train_async.py.",
        remedy="Remove --colocate and give the engines their own GPUs with --rollout-num-gpus.",
        guides=(ST,),
    ),
    Row(
        "CFG04",
        "--max-tokens-per-gpu without --use-dynamic-batch-size",
        "P",
        "error",
        symptom="The token limit has no effect and memory runs out.",
        cause="--max-tokens-per-gpu only limits dynamic micro-batches.",
        checked="One of the two flags without the other.",
        remedy="Set both --use-dynamic-batch-size and --max-tokens-per-gpu; rollout_max_response_len / "
        "context_parallel_size is a safe start.",
        guides=(MQ,),
    ),
    Row(
        "CFG05",
        "missing or conflicting flags",
        "P",
        "error",
        symptom="The command is rejected before it starts.",
        cause="A value is missing, out of range, or conflicts with another one.",
        checked="The type and range of every flag, and all rules between flags.",
        remedy="The message names the flags, their values, and what to change.",
    ),
    Row(
        "HOOK01",
        "a hook cannot be used",
        "PRX",
        "error",
        symptom="ImportError or AttributeError for a --*-path flag, or a generate function that generates no samples.",
        cause="The module cannot be imported, it does not define the function, or the function raises.",
        checked="Every --*-path flag is imported and its signature compared with the arguments that it gets; at each "
        "step, how many samples a generate function left without a response.",
        remedy="Write package.module.function or file.py:function; the message shows what was raised and where.",
    ),
    Row(
        "HOOK02",
        "a hook blocks the event loop",
        "R",
        "warning",
        symptom="Rollouts with a custom generate function take many times longer, and the engine is idle.",
        cause="The function blocks without `await`: a synchronous HTTP request, `time.sleep`, a subprocess, or "
        "computation. All samples share one thread.",
        checked="Each rollout: the seconds that --custom-generate-function-path ran without awaiting, as a fraction of "
        "the rollout.",
        remedy="Use an asynchronous library (httpx.AsyncClient instead of requests), or "
        "`await asyncio.to_thread(function, ...)`.",
    ),
)
