"""Settings that only --train-backend megatron has, beside those of `TrainFlags`."""

from __future__ import annotations

from dataclasses import dataclass

from furlong.config.flag import flag


@dataclass(frozen=True)
class MegatronFlags:
    """What only --train-backend megatron has: how pipelines and experts are cut further."""

    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None,
        "Interleave the pipeline: each of its ranks has several parts of the model, of this many layers each.",
        within="[1, inf)",
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None, "The same by the number of parts that a rank has; also where stages are uneven.", within="[1, inf)"
    )
    decoder_first_pipeline_num_layers: int | None = flag(
        None, "Layers of the first pipeline stage, where they are not as many as the others'.", within="[1, inf)"
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        None, "Layers of the last pipeline stage, where they are not as many as the others'.", within="[1, inf)"
    )
    expert_tensor_parallel_size: int | None = flag(
        None, "Training processes that share each expert. Without it: --tensor-model-parallel-size.", within="[1, inf)"
    )
