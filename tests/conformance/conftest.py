"""One site for all planted faults: the CPU, with one thread. And a small plugin, really installed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from hardpoint.conformance import plan
from hardpoint.conformance.site import Site
from hardpoint.plugin_host import discover
from tests.out_of_tree.build import Dist, install

_KERNELS = """
import os, pathlib, signal, subprocess, sys, time, torch

def right(x, weight, out, *, eps):
    wide = x.float()
    out.copy_(wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float())

def wrong(x, weight, out, *, eps):
    right(x, weight * 1.01, out, eps=eps)

def crashes(x, weight, out, *, eps):
    if x.shape[-1] == 129:
        print("about to fall", flush=True)
        os.abort()
    right(x, weight, out, eps=eps)

def hangs(x, weight, out, *, eps):
    if x.shape[-1] == 129:
        for own in (False, True):
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=own)
        if "TRIED_MARKS" in os.environ:
            pathlib.Path(os.environ["TRIED_MARKS"], str(os.getpid())).touch()
        time.sleep(600)
    right(x, weight, out, eps=eps)

WAYS = {
    129: lambda: os.kill(os.getpid(), signal.SIGSEGV),
    8192: lambda: os._exit(3),
    128: lambda: os._exit(0),
    512: lambda: sys.exit(4),
}

def falls(x, weight, out, *, eps):
    WAYS.get(x.shape[-1], lambda: None)()
    right(x, weight, out, eps=eps)
"""
TRIED_KERNELS = ("right", "wrong", "crashes", "hangs", "missing", "falls")
_MANIFEST = """
schema = 1
api = "0.2"
[plugin]
name = "tried"
[config.speed]
type = "int"
default = 1
help = "Nothing."
""" + "".join(
    f"""
[[contribution]]
family = "op"
of = "rms_norm"
name = "tried_{name}"
target = "hp_tried.kernels:{name}"
form = "out"
platforms = ["cpu"]
priority = {priority}
summary = "A norm"
requires = [{{ dtype = ["float32"] }}]
"""
    for priority, name in enumerate(reversed(TRIED_KERNELS), 1)
)
TRIED = Dist(
    "hp-tried",
    {
        "hp_tried/__init__.py": "",
        "hp_tried/plugin.py": "",
        "hp_tried/kernels.py": _KERNELS,
        "hp_tried/hardpoint.toml": _MANIFEST,
    },
    {"tried": "hp_tried.plugin"},
)


_cover, _covered = plan._cover, dict[str, list[list[int]]]()


def _cover_once(
    sizes: Mapping[str, int], strength: int, seed: int, excluded: Sequence[tuple[tuple[str, ...], set[tuple[int, ...]]]]
) -> list[list[int]]:
    key = str((sizes, strength, seed, [(names, sorted(clashing)) for names, clashing in excluded]))
    if key not in _covered:
        _covered[key] = _cover(sizes, strength, seed, excluded)
    return _covered[key]


@pytest.fixture(autouse=True)
def covering_arrays_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One takes up to seconds, and all faults of a family are sought with the same."""
    monkeypatch.setattr(plan, "_cover", _cover_once)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """The CPU platform."""
    threads = torch.get_num_threads()
    yield Site.open(discover(), "cpu", {"cpu": {"threads": 1}})
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tried-site")
    install([TRIED], folder, tmp_path_factory.mktemp("tried-wheel"))
    return folder


@pytest.fixture
def tried_plugin(_installed: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The plugin ``tried`` is installed for the length of a test, here and in processes started by it."""
    monkeypatch.syspath_prepend(str(_installed))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(_installed), os.environ.get("PYTHONPATH")])))
    return _installed
