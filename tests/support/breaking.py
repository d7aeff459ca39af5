"""Plugins that fail: a kernel that serves some calls well and then does, in each of the ways in which kernels do, and
one beside which an engine's process dies of a request.
"""

from __future__ import annotations

from pathlib import Path

from tests.out_of_tree.build import Dist, install

_MANIFEST = """schema = 1
api = "0.2"
[plugin]
name = "breaking"
[[contribution]]
family = "op"
of = "rms_norm"
name = "breaking"
target = "hp_breaking:norm"
priority = 1000
requires = [{ feature = ["batch_invariant"] }]
"""

_KERNEL = """
import ctypes, os, time
from hardpoint_cpu.ops.norm import rms_norm

num_calls = 0

def fail(x):
    %s

def norm(x, weight, *, eps):
    global num_calls
    num_calls += 1
    if num_calls > 40:
        fail(x)
    return rms_norm(x, weight, eps=eps)
"""

WAYS = {
    "raises": "raise ValueError('not a multiple of 16')",
    "crashes": "ctypes.string_at(0)",
    "aborts": "os.abort()",
    "hangs": "time.sleep(1000)",
}


POISON = (7, 7, 7)
"""The beginning of a prompt that kills an engine's process."""

_DEADLY = f"""
import os, signal
from hardpoint.engine.core import EngineCore
from hardpoint_cpu.ops.norm import rms_norm as norm

queue, step, taken = EngineCore.queue, EngineCore.step, []

def noting(self, request):
    taken.append(tuple(request.asked.prompt_token_ids[:3]))
    queue(self, request)

def dying(self):
    if {POISON} in taken:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self)

EngineCore.queue, EngineCore.step = noting, dying
"""


def install_deadly(folder: Path) -> Path:
    """Install a plugin ``breaking`` with which a core's process is killed before the first step of a poisoned request,
    as the system does where memory runs out. Returns where."""
    return _install(folder, _DEADLY)


def install_breaking(folder: Path, way: str, *, opaque: bool = False) -> Path:
    """Install the plugin and return where; ``opaque`` like a compiled kernel: no stack shows whose code it is."""
    kernel = _KERNEL % WAYS[way]
    return _install(folder, f"exec(compile({kernel!r}, '<compiled>', 'exec'))\n" if opaque else kernel)


def _install(folder: Path, source: str) -> Path:
    files = {"hp_breaking/__init__.py": source, "hp_breaking/hardpoint.toml": _MANIFEST}
    site, scratch = folder / "site", folder / "wheels"
    scratch.mkdir()
    install([Dist("breaking-hardpoint", files, {"breaking": "hp_breaking"})], site, scratch)
    return site
