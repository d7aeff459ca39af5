"""The words for a rank that hangs, from its stacks."""

from __future__ import annotations

import tempfile
from typing import Any, NoReturn

import pytest

from hardpoint.engine.execution.ranks.hang import describe, own_stacks

RANK = '  File "/site/hardpoint/engine/execution/ranks/rank_process.py", line 151 in serve\n'
WAITS = (
    "Fatal Python error: Aborted\n\n"
    'Thread 0x1 (most recent call first):\n  File "/lib/threading.py", line 331 in wait\n\n'
    'Current thread 0x2 (most recent call first):\n  File "/site/hardpoint_cpu/shared_memory.py", line 9 in _wait\n'
    '  File "/site/hardpoint/parallel/groups.py", line 104 in all_reduce\n'
    '  File "/site/hardpoint/layers/linear.py", line 88 in forward\n' + RANK
)
COMPUTES = 'Thread 0x1 (most recent call first):\n  File "/site/acme/kernel.py", line 3 in apply\n' + RANK
LISTENS = (
    'Thread 0x3 (most recent call first):\n  File "/lib/selectors.py", line 415 in select\n'
    '  File "/site/hardpoint/engine/execution/ranks/rank_process.py", line 179 in listen\n\n'
)
COLLECTS = (
    "Thread 0x4 (most recent call first):\n"
    '  File "/site/hardpoint/engine/execution/ranks/rank_process.py", line 227 in _collect\n\n'
)
AWAITS = "Thread 0x1 (most recent call first):\n" + RANK
IDLE = 'Current thread 0x1 (most recent call first):\n  File "/lib/threading.py", line 331 in wait\n'


@pytest.mark.parametrize(
    ("stack", "said"),
    [
        (WAITS, "waits in all_reduce, called in forward (hardpoint/layers/linear.py:88)"),
        (COMPUTES, "is in apply (kernel.py:3)"),
        (LISTENS + COMPUTES, "is in apply (kernel.py:3)"),
        (COLLECTS + COMPUTES, "is in apply (kernel.py:3)"),
        (COLLECTS + AWAITS, "is in no step"),
        (IDLE, "is in no step"),
        ("", "does not react"),
    ],
    ids=["waits", "computes", "computes beside a listener", "computes beside a collector", "awaits", "idle", "stopped"],
)
def test_it_is_told(stack: str, said: str) -> None:
    assert describe(stack) == said


def test_a_process_writes_its_own_stacks_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, or no descriptor left, must not keep a rank from saying what it does."""

    def full(*_: Any, **__: Any) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    stacks: list[str] = []

    def serve() -> None:  # as a rank's main loop is called
        all_reduce()

    def all_reduce() -> None:
        stacks.append(own_stacks())

    serve()
    (frames,) = [text for text in stacks[0].split("\n\n") if "in all_reduce" in text]
    names = [line.rpartition(" in ")[2] for line in frames.splitlines()[1:]]
    assert names.index("all_reduce") + 1 == names.index("serve")
