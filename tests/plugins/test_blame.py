"""An error of a plugin's class while a model is built names plugin, contribution and target."""

from __future__ import annotations

import traceback
from typing import Any, cast

import pytest
import torch

from hardpoint import LLM
from hardpoint.attention.build import attention_backend
from hardpoint.kernel_calls import KernelCalls
from hardpoint.layers import PluggableLayer
from hardpoint.layers.linear import Linear
from hardpoint.plugin_host import Offer
from hardpoint.plugin_host.blame import blame
from hardpoint.quantization.assignment import Quantization
from hardpoint.reference.attention import ReferenceAttention
from hardpoint.reference.linear import PlainLinear
from hardpoint_plugin_api import (
    AttentionBackend,
    AttentionSpec,
    ConfigError,
    LinearArgs,
    LinearKernel,
    PluginLoadError,
    WeightSlot,
)
from tests.plugins.conftest import Installer
from tests.selection.fakes import offer, select
from tests.support.engines import SMALL

SPEC = AttentionSpec(4, 2, 8, 0.2, "float32", "float32", 16)


class Block(PluggableLayer, name="blame_block"):
    """The layer that the replacements below replace."""

    def __init__(self, ctx: Any, args: Any) -> None:
        super().__init__(ctx)


class Context:
    """A context in which ``target`` wins in its family, and ``Linear`` among the layers elsewhere."""

    dtype, path, quantization = torch.float32, "model", Quantization()
    kernel_calls = KernelCalls(is_on=False)

    def __init__(self, family: str, target: object) -> None:
        self.family, self.target = family, target

    def select(self, workload: Any, *, binding: bool = True) -> Any:
        return select(offer("mine", family=workload.family, of=workload.of), workload=workload)

    def for_plugin(self, plugin: str) -> Context:
        assert plugin == "acme"
        return self

    def load(self, offer: Offer) -> object:
        return self.target if offer.contribution.family == self.family else Linear


def build(family: str, target: object) -> object:
    """Build what asks for ``family``, where ``target`` is what the plugin offers."""
    ctx = cast(Any, Context(family, target))
    if family == "attention":
        return attention_backend(ctx, SPEC)
    return Linear(ctx, LinearArgs(8, (("all", 4),))) if family == "linear" else Block(ctx, None)


def raising(base: type, error: Exception) -> type:
    """A subclass of ``base`` whose constructor raises ``error``."""

    def fail(self: object, *args: object) -> None:
        raise error

    return type("Raising", (base,), {"__init__": fail})


def declaring(answer: object) -> type[PluggableLayer]:
    """A replacement whose ``declare`` answers so; an exception is raised."""

    class Declaring(PluggableLayer):
        def __init__(self, ctx: Any, args: Any) -> None:
            super().__init__(ctx)

        def declare(self) -> dict[str, WeightSlot]:
            if isinstance(answer, Exception):
                raise answer
            return cast("dict[str, WeightSlot]", answer)

    return Declaring


KINDS: dict[str, tuple[type, type]] = {
    "attention": (AttentionBackend, ReferenceAttention),
    "linear": (LinearKernel, PlainLinear),
    "layer": (PluggableLayer, PluggableLayer),
}


@pytest.mark.parametrize("family", KINDS)
def test_a_class_that_cannot_be_built_is_blamed_by_name(family: str) -> None:
    base, sound = KINDS[family]
    broken = [(object, f"is no {base.__name__}"), (print, f"is no {base.__name__}")]
    broken.append((raising(sound, OSError("no driver")), "raised OSError: no driver"))
    if family != "layer":
        broken.append((type("Abstract", (base,), {}), "raised TypeError: Can't instantiate abstract class Abstract"))
    for target, fact in broken:
        with pytest.raises(PluginLoadError) as caught:
            build(family, target)
        for part in ("plugin acme: ", "mine", f"target 'acme_hp:mine' {fact}", "; fix: choose another"):
            assert part in str(caught.value)
        assert (caught.value.__cause__ is not None) == ("raised" in fact)


@pytest.mark.parametrize("family", KINDS)
def test_an_error_of_ours_passes_unchanged(family: str) -> None:
    error = ConfigError("acme.tile: only 8 is compiled")
    with pytest.raises(ConfigError) as caught:
        build(family, raising(KINDS[family][1], error))
    assert caught.value is error


@pytest.mark.parametrize(
    ("answer", "fact"),
    [
        (None, "must return dict[str, WeightSlot] from declare(), got None"),
        ({"weight": (4, 4)}, "must return dict[str, WeightSlot] from declare(), got {'weight': (4, 4)}"),
        ({3: WeightSlot((4,), "float32")}, "must return dict[str, WeightSlot] from declare()"),
        (KeyError("hidden"), "raised KeyError: 'hidden'"),
    ],
)
def test_slots_that_are_none_are_blamed_by_name(answer: object, fact: str) -> None:
    with pytest.raises(PluginLoadError) as caught:
        build("layer", declaring(answer))
    assert "plugin acme: " in str(caught.value)
    assert f"target 'acme_hp:mine' {fact}" in str(caught.value)


def test_a_sound_replacement_is_built() -> None:
    assert isinstance(build("layer", declaring({"weight": WeightSlot((4,), "float32")})), PluggableLayer)


@pytest.mark.parametrize("own_process", [False, True])
def test_what_a_kernel_raises_in_a_step(
    installed: Installer, own_process: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = installed("fails_in_steps")
    monkeypatch.setenv("PYTHONPATH", str(site))
    with (
        pytest.raises(Exception, match="not a multiple of 16") as caught,  # as soon as a step is prepared
        LLM(**SMALL, plugins=["cpu", "fails_in_steps"], core_process=own_process) as llm,
    ):
        llm.generate([1, 2])
    said = "".join(traceback.format_exception(caught.value))
    assert "Raised in plugin fails_in_steps (fails-in-steps-hardpoint 1.0), hp_fails_in_steps/ops.py, line 2." in said
    assert "It serves as op.rms_norm=failing." in said


def test_a_kernel_that_does_not_take_what_the_op_does(installed: Installer) -> None:
    installed("wrong_signature")
    fact = r"plugin wrong_signature .*cannot be called as rms_norm\(x, weight, \*, eps\)"
    with pytest.raises(PluginLoadError, match=fact):
        LLM(**SMALL, plugins=["cpu", "wrong_signature"])


def test_what_a_kernel_raises_while_weights_are_packed(installed: Installer) -> None:
    installed("fails_to_pack")
    with pytest.raises(PluginLoadError) as caught:
        LLM(**SMALL, plugins=["cpu", "fails_to_pack"])
    assert (
        "plugin fails_to_pack: linear: packing: target 'hp_fails_to_pack.kernels:Packing' raised KeyError: 'tile'"
        in str(caught.value)
    )
    assert isinstance(caught.value.__cause__, KeyError)


def test_what_a_backend_raises_while_the_engine_starts(installed: Installer) -> None:
    installed("fails_to_limit")
    with pytest.raises(NameError, match="undefined_name") as caught:
        LLM(**SMALL, plugins=["cpu", "fails_to_limit"], core_process=False)
    said = "".join(traceback.format_exception(caught.value))
    assert (
        "Raised in plugin fails_to_limit (fails-to-limit-hardpoint 1.0), hp_fails_to_limit/kernels.py, line 6." in said
    )
    assert "It serves as attention.causal=limits." in said
    assert said.count("Raised in plugin") == 1


def test_want_of_memory_stays_what_it_is() -> None:
    mine = offer("mine", family="linear")
    with pytest.raises(MemoryError) as caught, blame(mine):
        raise MemoryError
    assert caught.value.__notes__ == ["Raised in plugin acme: linear: mine."]
