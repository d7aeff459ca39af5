"""A kernel in one situation, from which calls can be drawn: what the adversarial checks need to know of any family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch

from hardpoint.conformance.memory import Placement, equal_bits
from hardpoint.conformance.site import Subject
from hardpoint.ops.judge import Call, Expected, sequence
from hardpoint_plugin_api import Reason


class Probe(Protocol):
    """Draws calls of one kernel in one situation. Calls share the kernel, and nothing else."""

    subject: Subject
    allocates: bool
    """Whether it may take memory in a step. A kernel that writes into its caller's outputs may not, once it is warm."""

    def call(
        self,
        seed: int,
        placement: Placement = Placement.AS_DRAWN,
        *,
        far: str | None = None,
        order: Sequence[int] | None = None,
    ) -> Call:
        """Draw the inputs of ``seed`` and lay them out.

        ``far`` is the label of an input to place past 2**31 elements (raises NotEnoughMemoryError); ``order`` picks and
        permutes rows of all inputs that belong to the rows of the result.
        """
        ...

    def num_rows(self, call: Call) -> int:
        """How many rows ``order`` may pick from; 0 where rows cannot be told apart."""
        ...

    def not_recorded(self) -> str | None:
        """Why it may not be recorded with a step; None where it may."""
        ...

    def far_inputs(self, call: Call) -> Sequence[str]:
        """Labels of the inputs that can lie far apart."""
        ...


@runtime_checkable
class Chained(Protocol):
    """A probe of kernels whose results can be their inputs."""

    def links(self) -> Sequence[Callable[[torch.Tensor], torch.Tensor]] | Reason:
        """Calls of the kernel, to be made in turn: the first takes a call's first input, the last returns its like.

        A reason, where the kernel does not serve what that takes.
        """
        ...


def run(call: Call) -> tuple[torch.Tensor, ...]:
    """Run ``call`` as the checks do, in inference mode and on spoilt memory; return copies of outputs and state."""
    with torch.inference_mode():
        call.before()
        call.plan()
        outputs = sequence(call.run())
        return tuple(x.clone() for x in (*outputs, *call.state()))


def expected(call: Call) -> Expected | None:
    """The expected results of ``call``; None where the reference refuses inputs whose rows were picked and permuted."""
    try:
        return call.expect()
    except (IndexError, RuntimeError, ValueError):
        return None


def refill(call: Call, other: Call) -> bool:
    """Copy the inputs of ``other`` to where those of ``call`` lie; False, having done nothing, if shapes differ."""
    if [i.tensor.shape for i in call.inputs] != [i.tensor.shape for i in other.inputs]:
        return False
    with torch.inference_mode():
        for mine, new in zip(call.inputs, other.inputs, strict=True):
            mine.tensor.copy_(new.tensor)
    return True


def same_bits(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    """Whether two results are equal to the bit."""
    return len(a) == len(b) and all(map(equal_bits, a, b))
