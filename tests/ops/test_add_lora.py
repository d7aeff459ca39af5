"""The kit accepts other right forms of add_lora, and refuses planted faults."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hardpoint.ops.add_lora import add_lora
from tests.ops.judging import DTYPES, cases, failures

Tensor = torch.Tensor
reference = add_lora.reference


def token_by_token(y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapters: Tensor) -> None:
    """The definition."""
    for row, slot in enumerate(adapters.tolist()):
        if slot >= 0:
            update = b[:, slot].double() @ (a[slot].double() @ x[row].double())
            y[row] = (y[row].double() + update).to(y.dtype)


def every_slot_at_once(y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapters: Tensor) -> None:
    """Tokens get the sum of all adapters."""
    for slot in range(a.shape[0]):
        token_by_token(y, x, a, b, torch.full_like(adapters, slot))


def first_slot_without_an_adapter(y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapters: Tensor) -> None:
    reference(y, x, a, b, adapters.clamp(min=0))


def last_slot_forgotten(y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapters: Tensor) -> None:
    reference(y, x, a[:-1], b[:, :-1], adapters)


def last_rank_forgotten(y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapters: Tensor) -> None:
    reference(y, x, a[:, :-1], b[:, :, :-1], adapters)


def last_column_forgotten(y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapters: Tensor) -> None:
    reference(y, x[:, :-1], a[:, :, :-1], b, adapters)


def y_replaced(y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapters: Tensor) -> None:
    y.zero_()
    reference(y, x, a, b, adapters)


def slots_of_neighbours(y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapters: Tensor) -> None:
    reference(y, x, a, b, adapters.roll(1))


def blocks_of_eight_tokens(y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapters: Tensor) -> None:
    """Each block of tokens gets the adapter of its first."""
    reference(y, x, a, b, adapters[::8].repeat_interleave(8)[: len(adapters)])


def middle_rounded_to_8_bits(y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapters: Tensor) -> None:
    reference(y, x, a.to(torch.float8_e4m3fn).to(a.dtype), b, adapters)


FAULTS = (
    every_slot_at_once,
    first_slot_without_an_adapter,
    last_slot_forgotten,
    last_rank_forgotten,
    last_column_forgotten,
    y_replaced,
    slots_of_neighbours,
    blocks_of_eight_tokens,
    middle_rounded_to_8_bits,
)


def middle_rounded(y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapters: Tensor) -> None:
    """The op with its middle rounded to x's dtype, as matrix units of 16 bits need it."""
    for row, slot in enumerate(adapters.tolist()):
        if slot >= 0:
            middle = (a[slot].double() @ x[row].double()).to(x.dtype)
            y[row] = (y[row].double() + b[:, slot].double() @ middle.double()).to(y.dtype)


def middle_summed_in_its_dtype(y: Tensor, x: Tensor, a: Tensor, b: Tensor, adapters: Tensor) -> None:
    """Partial sums of 32 inputs are kept in x's dtype."""
    for row, slot in enumerate(adapters.tolist()):
        if slot >= 0:
            middle = torch.zeros(a.shape[1], dtype=x.dtype)
            for start in range(0, x.shape[1], 32):
                part = a[slot, :, start : start + 32].double() @ x[row, start : start + 32].double()
                middle = (middle.double() + part).to(x.dtype)
            y[row] = (y[row].double() + b[:, slot].double() @ middle.double()).to(y.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_middle_that_is_rounded_once_passes(dtype: torch.dtype) -> None:
    assert not failures(add_lora, middle_rounded, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_middle_that_is_summed_in_16_bits_is_found(dtype: torch.dtype) -> None:
    assert failures(add_lora, middle_summed_in_its_dtype, dtype)


def test_long_steps_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers, whatever the number of tokens at a time, and without all tokens in float32."""
    for case in cases(add_lora, torch.float32):
        whole, split = case.args[0].clone(), case.args[0].clone()
        reference(whole, *case.args[1:])
        monkeypatch.setattr("hardpoint.ops.add_lora._MOST_WIDE", 1000)
        reference(split, *case.args[1:])
        monkeypatch.undo()
        torch.testing.assert_close(split, whole, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_definition_passes(dtype: torch.dtype) -> None:
    assert not failures(add_lora, token_by_token, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_faults_are_found(fault: Callable[..., None], dtype: torch.dtype) -> None:
    assert failures(add_lora, fault, dtype)


def test_slots_have_no_say_in_other_tokens() -> None:
    y, x, a, b = torch.zeros(3, 4), torch.ones(3, 5), torch.ones(2, 1, 5), torch.ones(4, 2, 1)
    a[1] = 3e38
    reference(y, x, a, b, torch.tensor([0, -1, 0], dtype=torch.int32))
    assert y.tolist() == [[5.0] * 4, [0.0] * 4, [5.0] * 4]
