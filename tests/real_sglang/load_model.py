"""python load_model.py FOLDER,MODULE,CLASS...: the tensors of SGLang's own models that have loaded folders, on a CPU.

Writes FOLDER/loaded.json for each: the checksum of every parameter by its name.
"""

from __future__ import annotations

import importlib
import json
import socket
import sys
from pathlib import Path
from types import ModuleType

import torch

from furlong.transfer.device_checksum import Checksums


def initialize(folder: str) -> None:
    """Prepare this process for models of SGLang on a CPU; `folder` is any model."""
    kernels = ModuleType("vllm._custom_ops")  # imported where there is no CUDA, and not called
    kernels.rotary_embedding = None
    sys.modules |= {"vllm": ModuleType("vllm"), kernels.__name__: kernels}
    from sglang.srt import server_args
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe import initialize_moe_config

    args = server_args.ServerArgs(model_path=folder, device="cpu", dtype="bfloat16", attention_backend="torch_native")
    server_args.set_global_server_args_for_scheduler(args)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    init_distributed_environment(1, 0, local_rank=0, distributed_init_method=address, backend="gloo")
    initialize_model_parallel()
    initialize_dp_attention(args, ModelConfig(model_path=folder, dtype="bfloat16"))
    initialize_moe_config(args)
    torch.set_default_dtype(torch.bfloat16)


def main(models: list[list[str]]) -> None:
    """Load each model and write its checksums."""
    initialize(models[0][0])
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.loader import DefaultModelLoader

    loader = DefaultModelLoader(LoadConfig())
    for folder, module, name in models:
        config = ModelConfig(model_path=folder, dtype="bfloat16")
        model = getattr(importlib.import_module(f"sglang.srt.models.{module}"), name)(config.hf_config)
        model.load_weights(loader._get_all_weights(config, model))  # as a server reads the folder
        sums = Checksums()
        for each, parameter in model.named_parameters():
            sums.add(each, [parameter.detach()])
        Path(folder, "loaded.json").write_text(json.dumps(sums.digests()))


if __name__ == "__main__":
    main([word.split(",") for word in sys.argv[1:]])
