"""How the engines store weights, and transports that cannot load them so."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from furlong.errors import ConfigError
from furlong.quantization.fp8 import Fp8Blocks, Fp8Scaled
from furlong.quantization.int4 import Int4Groups
from furlong.quickstart.quickstart import model_folder
from furlong.tools.quantize_folder import quantize_folder
from furlong.wiring.training import engine_scheme

REARRANGED = [Int4Groups(32), Fp8Scaled("channel", torch.bfloat16)]


def scheme_of(folder, form, *, engine="sglang", transport="ipc"):
    """The scheme of a run whose engines have the quickstart's model in this format."""
    quantize_folder(model_folder(), folder, form)
    config = SimpleNamespace(
        cluster=SimpleNamespace(engine=engine), sync=SimpleNamespace(update_weight_transport=transport)
    )
    return engine_scheme(SimpleNamespace(model_dir=folder, config=config))


@pytest.mark.parametrize("form", REARRANGED, ids=lambda form: form.description)
@pytest.mark.parametrize("transport", ["nccl", "disk"])
def test_weights_that_sglang_rearranges_need_ipc(tmp_path, form, transport):
    with pytest.raises(ConfigError, match=rf"--update-weight-transport {transport} .* by ipc; .*--colocate"):
        scheme_of(tmp_path, form, transport=transport)


def test_other_weights_and_engines_may_use_any_transport(tmp_path):
    for form, settings in [
        (REARRANGED[0], {}),
        (REARRANGED[0], {"engine": "embedded", "transport": "disk"}),
        (Fp8Blocks((128, 128)), {"transport": "nccl"}),
    ]:
        assert type(scheme_of(tmp_path, form, **settings).form) is type(form)
