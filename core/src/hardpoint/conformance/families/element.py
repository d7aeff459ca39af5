"""Trials of elements: that codes mean one value in every dtype, and that rounding takes the nearest.

The truth is the element's own list of values, ``decode`` of each code in float64 on the host: what an element means is
its author's to say. Whether stored checkpoints agree is for the trials of the quantization method that reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from hardpoint.conformance.plan import Plan
from hardpoint.conformance.site import Subject
from hardpoint.conformance.trials import Check, Finding, Trial
from hardpoint.dtypes import dtype_name, dtype_of
from hardpoint.quantization.elements import checked
from hardpoint_plugin_api import Contribution, Element

_DTYPES = ("float32", "float16", "bfloat16", "float64")
_SHAPE = (3, 5, -1)


class ElementTrials:
    """The generator of the family ``element``."""

    family = "element"

    def serves(self, contribution: Contribution) -> bool:
        """Every element: each brings its own values."""
        return True

    def trials(self, subject: Subject, plan: Plan) -> Iterator[Trial]:
        """On the host, where weights may be read, and on the device. All codes, whatever the level."""
        element = checked(subject.target, subject.offer)
        tries: list[tuple[str, Callable[[Element, torch.device], Finding]]] = [
            ("values", values),
            ("nearest", nearest),
            ("ends", ends),
            ("inputs", inputs),
        ]
        for device in dict.fromkeys((torch.device("cpu"), subject.site.device)):
            checks = [Check(name, partial(run, element, device)) for name, run in tries]
            yield Trial(str(device), checks)


def _codes(element: Element, device: torch.device) -> torch.Tensor:
    """Every code, as uint8 on the device."""
    return torch.arange(1 << element.bits, dtype=torch.uint8).to(device)


def values(element: Element, device: torch.device) -> Finding:
    """``values``: each code has the same value in every dtype, but for that dtype's rounding, and in any shape."""
    codes = _codes(element, device)
    true = element.decode(codes.cpu().clone(), torch.float64)
    if len(element.values) < 2 or element.largest <= 0:
        return Finding.failed("values", element.name, f"needs a value above zero, has {list(element.values)}")
    for name in _DTYPES:
        dtype = dtype_of(name)
        turned = codes.repeat(3, 1).t().contiguous().t()
        for x, wanted in (
            (codes, true),
            (codes.expand(15, -1).reshape(_SHAPE), true.expand(15, -1).reshape(_SHAPE)),
            (turned, true.expand(3, -1)),
        ):
            got = element.decode(x.clone(), dtype)
            if got.dtype != dtype or got.shape != wanted.shape or got.device != x.device:
                text = f"of {list(x.shape)} in {name} is {dtype_name(got.dtype)} {list(got.shape)} on {got.device}"
                return Finding.failed("form", "decode", text)
            if not torch.equal(got.cpu().double().nan_to_num(nan=7e77), wanted.to(dtype).double().nan_to_num(nan=7e77)):
                return Finding.failed("values", f"decode in {name}", "is not the value that float64 has, rounded once")
    return Finding(compared=codes.numel())


def nearest(element: Element, device: torch.device) -> Finding:
    """``nearest``: values, what lies between them, and what is beyond the ends are rounded to the nearest value."""
    true = torch.tensor(element.values, dtype=torch.float64)
    middles = (true[1:] + true[:-1]) / 2
    beside = torch.cat([middles * (1 - 2**-20), middles, middles * (1 + 2**-20), (middles + true[1:]) / 2])
    reach = 2 * float(true.abs().max())
    zeros = torch.tensor([0.0, -0.0], dtype=torch.float64)
    x = torch.cat([true, beside, zeros, torch.linspace(-reach, reach, 257, dtype=torch.float64)]).float()
    codes = element.encode(x.to(device))
    if codes.dtype != dtype_of(element.storage) or codes.shape != x.shape or codes.device.type != device.type:
        text = f"of {list(x.shape)} is {dtype_name(codes.dtype)} {list(codes.shape)}; storage is {element.storage}"
        return Finding.failed("form", "encode", text)
    got = element.decode(codes, torch.float64).cpu()
    turned = element.encode(x.repeat(3, 1).t().contiguous().t().to(device))
    if turned.shape != (3, len(x)) or not torch.equal(
        element.decode(turned.contiguous(), torch.float64).cpu(), got.expand(3, -1)
    ):
        return Finding.failed("strided", "encode", "of a transposed tensor is not what it is of a contiguous one")
    error, least = (got - x).abs(), (x.double()[:, None] - true).abs().amin(1)
    wrong = ~(error <= least)
    if not wrong.any():
        return Finding()
    at = int(wrong.nonzero()[0])
    close = float(true[(x[at] - true).abs().argmin()])
    text = (
        f"{float(x[at]):.6g} becomes {float(got[at]):.6g}, {close:.6g} is nearer; {int(wrong.sum())} of {len(x)} differ"
    )
    return Finding.failed("nearest", "encode", text)


def ends(element: Element, device: torch.device) -> Finding:
    """``ends``: infinities and huge numbers become the ends, and nothing at all gives nothing."""
    far = torch.tensor([float("inf"), 3e38, -3e38, float("-inf")], device=device)
    got = element.decode(element.encode(far), torch.float64).tolist()
    high, low = element.values[-1], element.values[0]
    if got != [high, high, low, low]:
        return Finding.failed("ends", "encode", f"{far.tolist()} become {got}; the ends are {low} and {high}")
    empty = element.decode(element.encode(far[:0]), torch.float32)
    return Finding() if empty.shape == (0,) else Finding.failed("ends", "encode", f"of [0] is {list(empty.shape)}")


def inputs(element: Element, device: torch.device) -> Finding:
    """``inputs``: neither direction writes to what it is given."""
    x, codes = torch.linspace(-2, 2, 64, device=device), _codes(element, device)
    kept = x.clone(), codes.clone()
    element.encode(x)
    element.decode(codes, torch.float32)
    changed = [name for name, a, b in (("x", x, kept[0]), ("codes", codes, kept[1])) if not torch.equal(a, b)]
    return Finding.failed("mutated", ", ".join(changed), "has changed") if changed else Finding()
