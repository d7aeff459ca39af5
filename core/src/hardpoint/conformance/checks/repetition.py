"""Does the kernel compute its results from its inputs, each time?"""

from __future__ import annotations

from dataclasses import replace

import torch

from hardpoint.conformance.probe import Probe, expected, refill, run, same_bits
from hardpoint.conformance.trials import Finding
from hardpoint.ops.comparison import Fault
from hardpoint.ops.judge import Call, judge_call

_RUNS = 3
_TRIES = 8
_SWAPS = 200


def repeat(probe: Probe, seed: int) -> Finding:
    """``repeat``: equal inputs give equal bits, in the same memory and in other memory."""
    if not probe.subject.deterministic:
        return Finding.not_claimed("not-deterministic", "the target declares that it is not deterministic")
    first = probe.call(seed)
    wanted = run(first)
    for number in range(_RUNS):
        again = probe.call(seed)
        where = "in other memory"
        if number % 2:
            refill(first, again)
            again, where = first, "in the same memory"
        got = run(again)
        if not same_bits(wanted, got):
            index = next(i for i, pair in enumerate(zip(wanted, got, strict=True)) if not same_bits(pair[:1], pair[1:]))
            return Finding.failed("nondeterministic", f"result {index}", f"run {number + 2}, {where}, gave other bits")
    return Finding()


def fresh(probe: Probe, seed: int) -> Finding:
    """``fresh``: new inputs at the old addresses give new results, also where their sums and ends are as before."""
    first = probe.call(seed)
    run(first)
    others = (probe.call(seed + 1 + number) for number in range(_TRIES))
    second_seed, second = next(
        ((seed + 1 + n, other) for n, other in enumerate(others) if refill(first, other)), (0, None)
    )
    if second is None:
        return Finding.not_claimed("shapes-vary", "this case draws other shapes for each seed")
    faults = [
        Fault("cached-by-address", f.where, f"new inputs at the old addresses: {f.message} [{f.code}]")
        for f in judge_call(replace(first, expect=second.expect)).faults
    ]
    if faults:
        return Finding(tuple(faults))
    order = _look_alike(probe, second)
    if order is None:
        return Finding()
    refill(first, probe.call(second_seed))  # what was mutated stands again as it was drawn
    run(first)
    third = probe.call(second_seed, order=order)
    if expected(third) is None:
        return Finding()
    refill(first, third)
    return Finding(
        tuple(
            Fault("cached-by-fingerprint", f.where, f"two inner rows swapped: {f.message} [{f.code}]")
            for f in judge_call(replace(first, expect=third.expect)).faults
        )
    )


def _look_alike(probe: Probe, call: Call) -> list[int] | None:
    """An order that swaps two inner rows, if possible so that float32 sums stay the same to the bit."""
    count = probe.num_rows(call)
    pairs = [(i, j) for i in range(1, count - 2) for j in range(i + 1, count - 1)]
    rows = [i.tensor for i in call.inputs if i.tensor.is_floating_point() and i.tensor.shape[:1] == (count,)]
    orders = [[j if k == i else i if k == j else k for k in range(count)] for i, j in pairs[:_SWAPS]]
    if not orders or not rows:
        return orders[0] if orders else None
    on_device = torch.tensor(orders, device=rows[0].device)
    sums = [(x.float().sum(), torch.stack([x[order].float().sum() for order in on_device])) for x in rows]
    alike = torch.stack([swapped == whole for whole, swapped in sums]).all(0).tolist()  # the host waits here alone
    return orders[alike.index(True) if True in alike else 0]
