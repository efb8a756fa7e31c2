"""Folders of weights: checkpoints, Hugging Face models, quantization."""

from __future__ import annotations

from furlong.core.catalogue.row import MD, MQ, SD, SQ, ST, Row

ROWS = (
    Row(
        "CKPT01",
        "a folder to load from holds no complete checkpoint",
        "P",
        "error",
        symptom="Text is garbled from the first rollout, or a log says that no checkpoint was loaded.",
        cause="A trainer checkpoint has latest_checkpointed_iteration.txt; a Hugging Face model does not.",
        checked="--load and --ref-load hold latest_checkpointed_iteration.txt, and the iteration it names is complete.",
        remedy="Give the folder that --save wrote, pick a step with --ckpt-step, or start from a Hugging Face model "
        "with --hf-checkpoint.",
        guides=(MQ, MD, SQ, ST),
    ),
    Row(
        "CKPT02",
        "--ckpt-step names a step that is not there",
        "P",
        "error",
        symptom="The wrong iteration is loaded, or none.",
        cause="That step was not saved, or --keep-checkpoints removed it.",
        checked="--ckpt-step and --ref-ckpt-step name an iter_* folder that exists and is complete.",
        remedy="Use the nearest step that exists; the message lists them.",
        guides=(MQ, SQ),
    ),
    Row(
        "CKPT03",
        "engine and trainer hold different weights",
        "R",
        "error",
        symptom="The first rollout is garbled although the parameters were loaded.",
        cause="A tensor's name is mapped to another layer (an offset of pipeline stages), or it was quantized on the "
        "way, or the engine released a buffer and never got it back.",
        checked="After the first weight sync, checksums of tensors in the trainer against those in the engine: "
        "all with --check-weight-update-equal, a sample without.",
        remedy="The message names the first tensor that differs with both shapes, dtypes and norms; run again with "
        "--check-weight-update-equal and --debug-weight-sync 1 for all of them.",
        guides=(MD, SD),
    ),
    Row(
        "CKPT04",
        "a model folder is incomplete",
        "P",
        "error",
        symptom="Loading fails with a missing shard, or parts of the model keep random values.",
        cause="A download was interrupted, or a conversion left files out.",
        checked="Every shard of model.safetensors.index.json is there and as long as its header says, every tensor of "
        "the index is in its shard, every layer has entries, and layers of one kind have equally many.",
        remedy="Fetch or convert the model again; `furlong check DIR` names the shard or layer that is missing.",
        guides=(SD,),
    ),
    Row(
        "CKPT05",
        "the checkpoint was saved by another number of ranks",
        "P",
        "info",
        symptom="Parallel sizes differ from those of the save.",
        cause="The cluster or the parallel layout has changed; checkpoints are cut anew when they are read.",
        checked="Parallel sizes in the checkpoint against those of this run.",
        remedy="Nothing is to be done: the message says from which to which layout the state goes.",
        guides=(ST,),
    ),
    Row(
        "CKPT06",
        "what a resumed run starts from",
        "P",
        "warning",
        symptom="It is not clear whether a run goes on where it ended: step, data, optimizer and random state.",
        cause="--load names a folder with a checkpoint.",
        checked="--load: the step, the data's position, optimizer and random state that the checkpoint holds.",
        remedy="To resume, set --load to the folder of --save. The message lists what will be restored; a part "
        "that is missing starts anew.",
        guides=(MQ, SQ),
    ),
    Row(
        "CKPT07",
        "no model where --hf-checkpoint points",
        "P",
        "error",
        symptom="`transformers` cannot find a model, on one node or on some of several.",
        cause="The folder is not there or not complete, or it is a name on the hub, from which nothing is fetched.",
        checked="--hf-checkpoint is a folder with config.json, weights and a tokenizer that can be read.",
        remedy="Give a local folder with --hf-checkpoint; `hf download NAME --local-dir DIR` fetches one.",
        guides=(MQ, SQ),
    ),
    Row(
        "CKPT08",
        "a run would write over checkpoints",
        "P",
        "error",
        symptom="After a second start there are fewer checkpoints, or those of two runs in one folder.",
        cause="--save names a folder that is in use already, and --load does not continue from it.",
        checked="The checkpoints in --save against the rollout at which this run begins.",
        remedy="Continue them with --load, or give each run a folder of its own with --save.",
        guides=(),
    ),
    Row(
        "QNT01",
        "weights that are no linear layers would be quantized",
        "P",
        "error",
        symptom="A router or an embedding of an INT4 model is all zeros.",
        cause="quantization_config.ignore does not cover them, and the engine skips quantized names that it lacks.",
        checked="quantization_config.ignore against every two-dimensional weight that is no linear layer, and those "
        "that are stored unquantized.",
        remedy="Add the patterns that the message prints to quantization_config.ignore in config.json.",
        guides=(SD,),
    ),
    Row(
        "QNT02",
        "a quantized checkpoint is incomplete",
        "P",
        "error",
        symptom="A converted checkpoint lacks shards or layers.",
        cause="The conversion left something out, or was interrupted.",
        checked="The checks of CKPT04, and that every packed weight has its scales and shape.",
        remedy="Convert again; `furlong check DIR` names what is missing.",
        guides=(SD,),
    ),
)
