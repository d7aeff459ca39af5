"""The public names of ``import hardpoint``: all are there, and none is imported before it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hardpoint

LAZY = """
import sys, hardpoint
assert "torch" not in sys.modules, "the package itself needs no torch"
from hardpoint import SamplingParams, RequestOutputKind
assert "torch" not in sys.modules, "nor do these"
from hardpoint import CustomOp
assert "torch" in sys.modules
"""


def test_public_names_are_imported_when_they_are_used() -> None:
    subprocess.run([sys.executable, "-c", LAZY], check=True)


def test_every_public_name_is_there() -> None:
    for name in hardpoint.__all__:
        assert getattr(hardpoint, name) is not None
    with pytest.raises(AttributeError, match="'Nothing'"):
        hardpoint.Nothing  # noqa: B018  # a name that is not there


def test_the_interfaces_are_those_that_core_uses() -> None:
    from hardpoint.layers import PluggableLayer
    from hardpoint.ops.rms_norm import rms_norm

    assert hardpoint.PluggableLayer is PluggableLayer
    assert isinstance(rms_norm, hardpoint.CustomOp)
