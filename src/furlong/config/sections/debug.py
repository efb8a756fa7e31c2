"""Flags of the section `debug`."""

from __future__ import annotations

from dataclasses import dataclass

from furlong.config.flag_spec import flag


@dataclass(frozen=True)
class DebugFlags:
    """Dumps, replay, profiling, tracing and determinism checks."""

    debug_rollout_only: bool = flag(False, "Only generate and score; the trainer is not created.")
    debug_train_only: bool = flag(False, "Only train, on --load-debug-rollout-data; no engine is created.")
    save_debug_rollout_data: str | None = flag(
        None, "File for the samples of each rollout (safetensors); `{rollout_id}` is replaced."
    )
    load_debug_rollout_data: str | None = flag(
        None, "File of samples to train on instead of generating; `{rollout_id}` is replaced. Sets --debug-train-only."
    )
    load_debug_rollout_data_subsample: float | None = flag(
        None, "Fraction of those samples to use.", within="(0, 1]", needs="load_debug_rollout_data"
    )
    save_debug_train_data: str | None = flag(
        None,
        "File for the training batch of each rollout; `{rollout_id}` is replaced, and `{rank}` by the rank, as each "
        "rank writes its own part.",
    )
    dump_details: str | None = flag(None, "Directory for both dumps: samples and training batches.")
    debug_rollout_print_every: int | None = flag(
        None, "Rollouts between samples that are logged in full.", within="[1, inf)"
    )
    trace: bool = flag(
        False,
        "Record what each process does over time, in trace.json in the run directory; open it in ui.perfetto.dev.",
    )
    use_pytorch_profiler: bool = flag(
        False, "Profile training with PyTorch's profiler; results are in profile/ in the run directory."
    )
    profile_target: tuple[str, ...] = flag(
        ("train_overall",),
        "What to profile: train_overall (the whole training round), train_actor (the optimizer steps), "
        "train_log_probs.",
        needs="use_pytorch_profiler",
    )
    profile_step_start: int = flag(
        1,
        "First rollout to profile; the first of a run includes warm-up.",
        within="[0, inf)",
        needs="use_pytorch_profiler",
    )
    profile_step_end: int = flag(
        2, "Rollout before which profiling ends.", within="[1, inf)", needs="use_pytorch_profiler"
    )
    record_memory_history: bool = flag(
        False, "Record GPU memory allocations in profile/; view them at pytorch.org/memory_viz."
    )
    memory_snapshot_num_steps: int = flag(
        1,
        "Number of rollouts after which the memory snapshot is written.",
        within="[1, inf)",
        needs="record_memory_history",
    )
    debug_weight_sync: int = flag(0, "1 logs every tensor of a weight update with its checksum.", within="[0, 1]")
    debug_determinism: bool = flag(
        False,
        "Write hashes of data order, tokens, log-probs, advantages, loss, gradients and parameters of each step to "
        "determinism.jsonl; `furlong diff` compares two runs.",
    )
    replay: str | None = flag(
        None,
        "Directory of a run whose completion order to reproduce, so that an asynchronous run is repeated bit for bit.",
    )
    check_weight_update_equal: bool = flag(
        False, "Update weights twice at start-up and fail if any tensor in the engine differs."
    )
