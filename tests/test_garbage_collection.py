"""Collections pause while modules are imported, and leave out what is there then."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import gc
from hardpoint.garbage_collection import no_collections

class Node:
    alive = 0
    def __init__(self):
        Node.alive += 1
        self.itself = self
    def __del__(self):
        Node.alive -= 1

runs = []
gc.callbacks.append(lambda phase, info: runs.append(phase))
{switch}
try:
    with no_collections():
        nodes = [Node() for _ in range(20_000)]
        print("collections inside", len(runs))
        {fault}
except ValueError:
    pass
print("on", gc.isenabled())
del nodes
gc.collect()
print("of those inside", Node.alive)
Node()
gc.collect()
print("of later ones", Node.alive - 20_000)
"""


def _prints(switch: str = "", fault: str = "") -> dict[str, str]:
    program = _PROGRAM.format(switch=switch, fault=fault)
    lines = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    return dict(line.rsplit(" ", 1) for line in lines.splitlines())


def test_what_is_made_inside_stays_and_garbage_made_later_is_collected() -> None:
    told = {"collections inside": "0", "on": "True", "of those inside": "20000", "of later ones": "0"}
    assert _prints() == told
    assert _prints(fault="raise ValueError") == told


def test_a_program_that_collects_no_garbage_keeps_it_so() -> None:
    assert _prints(switch="gc.disable()")["on"] == "False"
