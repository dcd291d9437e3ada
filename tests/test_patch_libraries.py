"""patch on the MLPs of torch.nn, torchvision and timm."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import xfused


def test_torch_nn(used):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    places = {e.place for e in xfused.patch(layer).patched}
    assert places == {"linear1 > activation > dropout", "linear2 > dropout2"}
    layer(torch.randn(2, 3, 8)).sum().backward()
    assert len(used) == 2
    chain = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Dropout(0.1), nn.Linear(8, 4), nn.Dropout(0.1))
    assert len(xfused.patch(chain).patched) == 2
    used.clear()
    chain(torch.randn(3, 4))
    assert len(used) == 2
    chain.append(nn.Linear(4, 2))
    assert chain(torch.randn(3, 4)).shape == (3, 2)
    assert len(xfused.patch(chain).patched) == 2


def test_torchvision():
    torchvision = pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))
    from torchvision.models.vision_transformer import MLPBlock

    for mlp in (MLPBlock(8, 16, 0.1), torchvision.ops.MLP(8, [16, 8], dropout=0.1, activation_layer=nn.GELU)):
        assert [e.became for e in xfused.patch(mlp)] == ["bias + gelu + dropout", "bias + dropout"]


def test_timm(used):
    pytest.importorskip("timm")
    from timm.layers import Mlp

    mlp = Mlp(8, 16, drop=0.1)
    assert [e.became for e in xfused.patch(mlp)] == ["bias + gelu + dropout", "bias + dropout"]
    mlp(torch.randn(2, 3, 8)).sum().backward()
    assert len(used) == 2 and mlp.fc1.bias.grad is not None
    assert xfused.patch(Mlp(8, 16, drop=0.1, use_conv=True)).patched[0].became == "gelu + dropout"


def test_transformers_is_not_imported():
    script = "import sys, torch, xfused; xfused.patch(torch.nn.Linear(2, 2)); assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
