"""Fingerprints: what makes a model this one, and what users may do to it without changing that."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import stand_ins
import torch
from diffusers import WanTransformer3DModel
from small_calibrations import WAN

from heart_attention.calibration import file


def test_fingerprint_knows_the_model(wan):
    print_ = file.fingerprint(wan)
    assert (print_["layers"], print_["heads"], print_["head_dim"]) == (3, 2, 12)
    assert print_["class"] == "WanTransformer3DModel"
    torch.manual_seed(1)
    other = file.fingerprint(WanTransformer3DModel(**WAN))
    assert {k for k in print_ if other[k] != print_[k]} == {"values_digest"}
    assert file.fingerprint(WanTransformer3DModel(**{**WAN, "ffn_dim": 24})) != print_


def test_fingerprint_stays_through_what_users_do():
    model = WanTransformer3DModel(**WAN)
    before = file.fingerprint(model)
    model.fuse_qkv_projections()
    assert file.fingerprint(model) == before
    model.unfuse_qkv_projections()
    assert file.fingerprint(SimpleNamespace(_orig_mod=model)) == before  # as torch.compile wraps it
    model.to(torch.bfloat16)
    assert file.fingerprint(model) == before
    model.register_to_config(sparse_attention_config={"config_groups": {}})
    assert file.fingerprint(model) == before


def peft(model):
    config = pytest.importorskip("peft").LoraConfig(r=2, target_modules=["to_q", "to_v"])
    model.add_adapter(config)


@pytest.mark.parametrize("add", [stand_ins.lora, peft])
def test_fingerprint_stays_with_lora(add):
    model = WanTransformer3DModel(**WAN)
    before = file.fingerprint(model)
    add(model)
    assert file.fingerprint(model) == before


def test_fingerprint_of_a_quantised_model_has_no_values():
    model = WanTransformer3DModel(**WAN)
    before = file.fingerprint(model)
    stand_ins.int8(model)
    assert file.fingerprint(model) == {**before, "values_digest": None}
