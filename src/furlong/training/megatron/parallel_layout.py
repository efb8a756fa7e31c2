"""Parallel layouts of Megatron-core, and the models that fit them. Imports neither Megatron-core nor torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from furlong.config.sections import MegatronFlags, TrainFlags
from furlong.errors import ConfigError
from furlong.training.megatron.family import USE_FSDP, Family, family_of

NOT_INSTALLED = (
    "--train-backend megatron needs megatron-core, which is not installed; pip install 'furlong-rl[megatron]', or use "
    "--train-backend fsdp"
)
ROTARY = ("default", "linear", "llama3", "yarn")
REQUIRED = {"hidden_act": "silu", "mlp_bias": False}  # values that config.json must have where it has the field


@dataclass(frozen=True)
class Layout:
    """Sizes of tensor (TP), pipeline (PP), context (CP) and expert (EP) parallelism; other ranks are data-parallel.

    virtual: model chunks per pipeline rank (interleaved schedule). first_layers, last_layers: layers of the first and
    the last pipeline stage, where they differ from the others. expert_tensor: tensor parallelism within an expert.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    sequence_parallel: bool = False
    virtual: int = 1
    first_layers: int | None = None
    last_layers: int | None = None
    expert_tensor: int = 1

    @staticmethod
    def of(flags: TrainFlags, megatron: MegatronFlags, num_layers: int | None = None) -> Layout:
        """Return the layout that the flags configure for a model with `num_layers`; see `layout_flag_problems`."""
        per_part, virtual = (
            megatron.num_layers_per_virtual_pipeline_stage,
            megatron.num_virtual_stages_per_pipeline_rank or 1,
        )
        if per_part is not None and num_layers is not None and flags.pipeline_model_parallel_size > 1:
            virtual = max(num_layers // flags.pipeline_model_parallel_size // per_part, 1)
        first, last = megatron.decoder_first_pipeline_num_layers, megatron.decoder_last_pipeline_num_layers
        if first is None and last is None and virtual == 1 and num_layers is not None:
            last = uneven_last_stage(num_layers, flags.pipeline_model_parallel_size)
        return Layout(
            tensor=flags.tensor_model_parallel_size,
            pipeline=flags.pipeline_model_parallel_size,
            context=flags.context_parallel_size,
            expert=flags.expert_model_parallel_size,
            sequence_parallel=flags.sequence_parallel and flags.tensor_model_parallel_size > 1,
            virtual=virtual,
            first_layers=first,
            last_layers=last,
            expert_tensor=megatron.expert_tensor_parallel_size or flags.tensor_model_parallel_size,
        )

    def align(self) -> int:
        """The number that a rank's tokens of a micro-batch must be a multiple of."""
        return self.tensor if self.sequence_parallel else 1

    def passes_in_flight(self, stage: int) -> int:
        """Forward passes that a pipeline stage runs before its first backward pass (1F1B warm-up)."""
        if self.virtual == 1:
            return self.pipeline - stage
        return 2 * (self.pipeline - stage - 1) + (self.virtual - 1) * self.pipeline + 1


def uneven_last_stage(num_layers: int, stages: int) -> int | None:
    """Return the layers of the last pipeline stage that let the others be equal, if all cannot; None if they can.

    It is the number nearest to the mean, the smaller of two: the last stage has the output layer, too. None also if
    there are fewer layers than stages.

    >>> uneven_last_stage(47, 2), uneven_last_stage(94, 4), uneven_last_stage(48, 4)
    (23, 22, None)
    """
    if num_layers % stages == 0 or num_layers < stages:
        return None
    sizes = [last for last in range(1, num_layers - stages + 2) if (num_layers - last) % (stages - 1) == 0]
    return min(sizes, key=lambda last: abs(last * stages - num_layers))


def uneven_notice(flags: TrainFlags, megatron: MegatronFlags, num_layers: int | None) -> str | None:
    """Return a line on stages that differ without a flag that says so, which Megatron refuses; None if there are none.

    --strict-flags makes it an error.
    """
    layout = Layout.of(flags, megatron, num_layers)
    if num_layers is None or layout.last_layers == megatron.decoder_last_pipeline_num_layers:
        return None
    others = (num_layers - (layout.last_layers or 0)) // (layout.pipeline - 1)
    return (
        f"--pipeline-model-parallel-size {layout.pipeline} does not divide the {num_layers} layers: the last stage has "
        f"{layout.last_layers}, each other {others}, as with --decoder-last-pipeline-num-layers {layout.last_layers}"
    )


def described(layout: Mapping[str, Any] | None) -> str:
    """Describe the layout in a checkpoint's `trainer.json`; None is one of --train-backend fsdp."""
    if layout is None:
        return "--train-backend fsdp"
    sizes = ", ".join(f"{name} {value}" for name, value in layout.items() if value not in (1, False, None))
    return f"--train-backend megatron ({sizes or 'data-parallel'})"


def model_problems(config: Mapping[str, Any], layout: Layout) -> Iterator[str]:
    """Yield why a model, given by its config.json, cannot be trained with a layout; one message for each reason."""
    try:
        family = family_of(config.get("model_type"))
    except ConfigError as error:
        yield str(error)
        return
    yield from _architecture_problems(config, family)
    yield from _division_problems(config, family, layout)


def _architecture_problems(config: Mapping[str, Any], family: Family) -> Iterator[str]:
    for name, value in {**REQUIRED, **family.required}.items():
        if config.get(name, value) != value:
            yield f"config.json has {name} {config[name]}, which --train-backend megatron does not support; {USE_FSDP}"
    if kinds := {str(kind) for kind in config.get("layer_types") or ()} - set(family.layer_kinds):
        yield f"the model has {', '.join(sorted(kinds))} layers; --train-backend megatron has none; {USE_FSDP}"
    rope: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROTARY:
        yield f"rotary embeddings of type {kind}; --train-backend megatron has {', '.join(ROTARY)}; {USE_FSDP}"
    rotated = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if kind == "yarn" and rotated != 1.0 and not family.partial_yarn:
        yield f"YaRN over {rotated:g} of each head, which --train-backend megatron does not support; {USE_FSDP}"


def layout_flag_problems(flags: TrainFlags, megatron: MegatronFlags, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield why flags do not fit a model, given by its config.json, where `Layout.of` the flags does not show it."""
    per_part, pipeline = megatron.num_layers_per_virtual_pipeline_stage, flags.pipeline_model_parallel_size
    layers = config.get("num_hidden_layers", 0)
    if per_part is not None and pipeline > 1 and layers % pipeline == 0 and (stage := layers // pipeline) % per_part:
        yield (
            f"--num-layers-per-virtual-pipeline-stage {per_part} does not divide the {layers} / {pipeline} = {stage} "
            "layers of a pipeline stage; use a divisor"
        )
    # slime's scripts set 1 for every model
    if (megatron.expert_tensor_parallel_size or 1) > 1 and not num_experts(config):
        yield (
            f"--expert-tensor-parallel-size {megatron.expert_tensor_parallel_size} has no effect: the model has no "
            "experts; remove it"
        )


def num_experts(config: Mapping[str, Any]) -> int:
    """Return the experts per MoE layer, 0 for a dense model."""
    return config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 0


def _stage_problems(num_layers: int, layout: Layout) -> Iterator[str]:
    ends = {
        "--decoder-first-pipeline-num-layers": layout.first_layers,
        "--decoder-last-pipeline-num-layers": layout.last_layers,
    }
    fixed = {flag: count for flag, count in ends.items() if count is not None}
    named = " and ".join(f"{flag} {count}" for flag, count in fixed.items())
    stages, left = layout.pipeline - len(fixed), num_layers - sum(fixed.values())
    if not fixed:
        if left % stages:
            yield f"--pipeline-model-parallel-size {stages} does not divide the {left} layers; use a divisor"
            return
    elif left < stages or left % max(stages, 1) or (left and not stages):
        yield (
            f"{named}: {left} of the {num_layers} layers remain for the {stages} other stages of "
            f"--pipeline-model-parallel-size {layout.pipeline}, which must have equal sizes; change one of the flags"
        )
        return
    sizes = {f"{flag} {count}": count for flag, count in fixed.items()}
    if stages:
        sizes[f"a stage with {left} / {stages} = {left // stages} layers"] = left // stages
    for what, count in sizes.items():
        if count % layout.virtual:
            yield (
                f"--num-virtual-stages-per-pipeline-rank {layout.virtual} does not divide {what}; every stage has the "
                "same number of chunks, of equal size; use a divisor"
            )


def _division_problems(config: Mapping[str, Any], family: Family, layout: Layout) -> Iterator[str]:
    tensor, expert = layout.tensor, layout.expert
    for name, what in (
        ("num_attention_heads", "attention heads"),
        ("num_key_value_heads", "key/value heads"),
        ("vocab_size", "tokens of the vocabulary"),
        ("intermediate_size", "channels of intermediate_size"),
    ):
        has_dense = config.get("first_k_dense_replace") or "dense" in (config.get("mlp_layer_types") or ())
        if name == "intermediate_size" and num_experts(config) and not has_dense:
            continue
        if config.get(name, tensor) % tensor:
            yield f"--tensor-model-parallel-size {tensor} does not divide the {config[name]} {what}; use a divisor"
    heads = config.get("linear_num_key_heads") if "linear_attention" in family.layer_kinds else None
    if heads and heads % (tensor * layout.context):
        yield (
            f"--tensor-model-parallel-size {tensor} x --context-parallel-size {layout.context} does not divide the "
            f"{heads} key heads of the gated delta nets, which are split over both; reduce one of them"
        )
    if layers := config.get("num_hidden_layers"):
        yield from _stage_problems(layers, layout)
    experts = num_experts(config)
    if not family.splits_experts and layout.expert_tensor > 1:
        yield (
            f"experts of {config['model_type']} have biases, which cannot be split over {layout.expert_tensor} "
            "tensor-parallel ranks; add --expert-tensor-parallel-size 1"
        )
    if expert > 1 and not experts:
        yield f"--expert-model-parallel-size {expert} has no effect: the model has no experts; remove it"
    elif experts % expert:
        yield f"--expert-model-parallel-size {expert} does not divide the {experts} experts; use a divisor"
    field = "moe_intermediate_size" if config.get("moe_intermediate_size") else "intermediate_size"
    width = config.get(field) or 0
    if experts and width % layout.expert_tensor:
        yield (
            f"--expert-tensor-parallel-size {layout.expert_tensor} does not divide the {width} channels of an expert "
            f"({field}); use a divisor, 1 keeps experts whole"
        )
    if experts and tensor > 1 and not layout.sequence_parallel:
        yield (
            f"--tensor-model-parallel-size {tensor} with a mixture of experts needs --sequence-parallel, so that each "
            "rank dispatches its own tokens; add it"
        )
