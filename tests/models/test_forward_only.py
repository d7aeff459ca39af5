"""Functions of a model's code that have a backward pass of their own, called without it."""

from __future__ import annotations

import torch
from torch import nn
from transformers.models.bloom.modeling_bloom import BloomGelu

from hardpoint.models.transformers_code.forward_only import call_forward_only


def test_torch_func_sees_through_them() -> None:
    x = torch.randn(3, 5)
    expected = BloomGelu()(x)
    model = nn.Sequential(BloomGelu())
    call_forward_only(model)
    found = torch.func.functionalize(model)(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_other_modules_keep_theirs() -> None:
    changed, other, plain = BloomGelu(), BloomGelu(), nn.GELU()
    call_forward_only(nn.Sequential(changed, plain))
    assert "forward" in vars(changed)
    assert "forward" not in vars(other)
    assert "forward" not in vars(plain)
    x = torch.randn(3, requires_grad=True)
    assert other(x).grad_fn is not None
