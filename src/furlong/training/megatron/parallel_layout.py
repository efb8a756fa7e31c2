"""How the ranks of Megatron-core share a model, and which models it is given here. Imports neither it nor torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from furlong.config.sections.megatron import MegatronFlags
from furlong.config.sections.train import TrainFlags

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss")
ROTARY = ("default", "linear", "llama3", "yarn")
LAYERS = ("full_attention", "sliding_attention")
USE_FSDP = "use --train-backend fsdp"


@dataclass(frozen=True)
class Layout:
    """How many ranks share what: `tensor` a layer, `pipeline` the layers, `context` a sequence, `expert` the experts.

    The rest of the ranks are data-parallel. sequence_parallel: what tensor parallelism does not split is split by
    tokens. virtual: parts of the model, one after the other, that each pipeline rank has; first_layers, last_layers: of
    the first and the last pipeline rank, where they are not the others' number; expert_tensor: ranks that share an
    expert.
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
    def of(flags: TrainFlags, own: MegatronFlags, num_layers: int | None = None) -> Layout:
        """The layout that the flags ask for, of a model with `num_layers`; see `given_problems`."""
        per_part, virtual = own.num_layers_per_virtual_pipeline_stage, own.num_virtual_stages_per_pipeline_rank or 1
        if per_part is not None and num_layers is not None:
            virtual = max(num_layers // flags.pipeline_model_parallel_size // per_part, 1)
        return Layout(
            tensor=flags.tensor_model_parallel_size,
            pipeline=flags.pipeline_model_parallel_size,
            context=flags.context_parallel_size,
            expert=flags.expert_model_parallel_size,
            sequence_parallel=flags.sequence_parallel,
            virtual=virtual,
            first_layers=own.decoder_first_pipeline_num_layers,
            last_layers=own.decoder_last_pipeline_num_layers,
            expert_tensor=own.expert_tensor_parallel_size or flags.tensor_model_parallel_size,
        )

    def align(self) -> int:
        """Tokens of a rank's part that a micro-batch must have a multiple of."""
        return self.tensor if self.sequence_parallel else 1

    def passes_kept(self, stage: int) -> int:
        """Forward passes of its parts of the model that a pipeline stage does before it keeps to one backward each."""
        if self.virtual == 1:
            return self.pipeline - stage
        return 2 * (self.pipeline - stage - 1) + (self.virtual - 1) * self.pipeline + 1


@dataclass(frozen=True)
class Compute:
    """How layers are computed: what of them once more in the backward pass, and with which attention."""

    granularity: Literal["full", "selective"] | None = None
    method: Literal["uniform", "block"] | None = None
    num_layers: int | None = None
    modules: tuple[str, ...] = ()
    attention: Literal["auto", "flash", "unfused"] = "auto"

    @staticmethod
    def of(flags: TrainFlags, own: MegatronFlags) -> Compute:
        """What the flags ask for."""
        if flags.recompute_activations:
            return Compute("full", "uniform", 1, attention=own.attention_backend)
        return Compute(
            own.recompute_granularity,
            own.recompute_method,
            own.recompute_num_layers,
            own.recompute_modules or (),
            own.attention_backend,
        )


def described(layout: Mapping[str, Any] | None) -> str:
    """The layout in a checkpoint's `trainer.json`, in words; None is one of --train-backend fsdp."""
    if layout is None:
        return "--train-backend fsdp"
    sizes = ", ".join(f"{name} {value}" for name, value in layout.items() if value not in (1, False, None))
    return f"--train-backend megatron ({sizes or 'data-parallel'})"


def model_problems(config: Mapping[str, Any], layout: Layout) -> Iterator[str]:
    """Yield why a model, given by its config.json, cannot be trained with a layout; one message for each reason."""
    family = config.get("model_type")
    if family not in FAMILIES:
        yield f"--train-backend megatron knows the families {', '.join(FAMILIES)}, not {family}; {USE_FSDP}"
        return
    yield from _architecture_problems(config)
    yield from _division_problems(config, layout)


def _architecture_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """What a config of a known family may ask for that there are no layers for."""
    family = config["model_type"]
    for name, value in _refused(family).items():
        if config.get(name, value) != value:
            yield f"config.json has {name} {config[name]}, which --train-backend megatron does not build; {USE_FSDP}"
    if kinds := {str(kind) for kind in config.get("layer_types") or ()} - set(LAYERS):
        yield f"the model has {', '.join(sorted(kinds))} layers; --train-backend megatron has none; {USE_FSDP}"
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method", "of a kind that is not named")
        yield f"the weights are quantized ({method}); name a folder with weights in bfloat16"
    rope: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROTARY:
        yield f"rotary embeddings of type {kind}; --train-backend megatron has {', '.join(ROTARY)}; {USE_FSDP}"
    rotated = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if kind == "yarn" and rotated != 1.0 and family != "deepseek_v3":
        yield f"YaRN over {rotated:g} of a head's width, which --train-backend megatron does not build; {USE_FSDP}"


def _refused(family: str) -> dict[str, Any]:
    """Values that a config of the family may have where others are not built."""
    values: dict[str, Any] = {"hidden_act": "silu", "mlp_bias": False}
    if family == "gpt_oss":
        values |= {"attention_bias": True, "swiglu_alpha": 1.702}
    if family == "deepseek_v3":
        values |= {"attention_bias": False}
    return values


def given_problems(flags: TrainFlags, own: MegatronFlags, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what of the flags does not fit a model, given by its config.json, and is not seen in `Layout.of` them."""
    per_part, pipeline = own.num_layers_per_virtual_pipeline_stage, flags.pipeline_model_parallel_size
    layers = config.get("num_hidden_layers", 0)
    if per_part is not None and layers % pipeline == 0 and (stage := layers // pipeline) % per_part:
        yield (
            f"--num-layers-per-virtual-pipeline-stage {per_part} does not divide the {layers} / {pipeline} = {stage} "
            "layers of a pipeline stage; give a divisor"
        )
    # 1 is in every script of slime's, and is what a model without experts has
    if (own.expert_tensor_parallel_size or 1) > 1 and not num_experts(config):
        yield (
            f"--expert-tensor-parallel-size {own.expert_tensor_parallel_size} has no effect: the model has no experts; "
            "remove it"
        )


def num_experts(config: Mapping[str, Any]) -> int:
    """Experts of a layer that has them; 0 without. transformers has had several names for it."""
    return config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 0


def _stage_problems(num_layers: int, layout: Layout) -> Iterator[str]:
    """What does not fit in how the layers are cut over the pipeline, with the arithmetic."""
    ends = {
        "--decoder-first-pipeline-num-layers": layout.first_layers,
        "--decoder-last-pipeline-num-layers": layout.last_layers,
    }
    given = {flag: count for flag, count in ends.items() if count is not None}
    named = " and ".join(f"{flag} {count}" for flag, count in given.items())
    stages, left = layout.pipeline - len(given), num_layers - sum(given.values())
    if not given:
        if left % stages:
            yield f"--pipeline-model-parallel-size {stages} does not divide the {left} layers; give a divisor"
            return
    elif left < stages or left % max(stages, 1) or (left and not stages):
        yield (
            f"{named}: {left} of the {num_layers} layers are left for the {stages} other stages of "
            f"--pipeline-model-parallel-size {layout.pipeline}, which must have equal parts; change one of them"
        )
        return
    sizes = {f"{flag} {count}": count for flag, count in given.items()}
    if stages:
        sizes[f"a stage with {left} / {stages} = {left // stages} layers"] = left // stages
    for what, count in sizes.items():
        if count % layout.virtual:
            yield (
                f"--num-virtual-stages-per-pipeline-rank {layout.virtual} does not divide {what}; every stage has as "
                "many parts, of its layers / parts each; give a divisor"
            )


def _division_problems(config: Mapping[str, Any], layout: Layout) -> Iterator[str]:
    """What does not divide. A number that config.json leaves to the family's default is not looked at."""
    tensor, expert = layout.tensor, layout.expert
    for name, what in (
        ("num_attention_heads", "attention heads"),
        ("num_key_value_heads", "key/value heads"),
        ("vocab_size", "words of the vocabulary"),
        ("intermediate_size", "channels of intermediate_size"),
    ):
        if name == "intermediate_size" and num_experts(config) and not config.get("first_k_dense_replace"):
            continue  # layers with experts have their own
        if config.get(name, tensor) % tensor:
            yield f"--tensor-model-parallel-size {tensor} does not divide the {config[name]} {what}; give a divisor"
    if layers := config.get("num_hidden_layers"):
        yield from _stage_problems(layers, layout)
    experts = num_experts(config)
    if config["model_type"] == "gpt_oss" and layout.expert_tensor > 1:
        yield (
            f"gpt_oss has biases in its experts, which cannot be cut over {layout.expert_tensor} ranks; add "
            "--expert-tensor-parallel-size 1"
        )
    if expert > 1 and not experts:
        yield f"--expert-model-parallel-size {expert} has no effect: the model has no experts; remove it"
    elif experts % expert:
        yield f"--expert-model-parallel-size {expert} does not divide the {experts} experts; give a divisor"
    width = config.get("moe_intermediate_size") or 0
    if experts and width % layout.expert_tensor:
        yield (
            f"--expert-tensor-parallel-size {layout.expert_tensor} does not divide the {width} channels of an expert "
            "(moe_intermediate_size); give a divisor, 1 leaves experts whole"
        )
    if experts and tensor > 1 and not layout.sequence_parallel:
        yield (
            f"--tensor-model-parallel-size {tensor} with a model that has experts needs --sequence-parallel, so that "
            "each rank sends its own tokens to them; add it"
        )
