"""The model that calibrations here are made for."""

import pytest
import torch
from diffusers import WanTransformer3DModel
from small_calibrations import WAN


@pytest.fixture(scope="module")
def wan():
    torch.manual_seed(0)
    return WanTransformer3DModel(**WAN)
