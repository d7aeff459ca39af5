"""Which platform an engine runs on, and that a broken one is never passed over for a CPU."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from hardpoint.plugin_host import Offer
from hardpoint.selection import PlatformChoice, Settings, choose_platform, platform_choice, preset_choice
from hardpoint_plugin_api import (
    NO_DEVICE,
    DeviceInfo,
    Memory,
    Platform,
    PlatformError,
    Reason,
    SelectionError,
    UnknownNameError,
)
from tests.selection.fakes import FakePlugins, offer, reasons

NOTHING_HERE = Reason(NO_DEVICE, "no such card")
BROKEN = Reason("driver", "the driver is older than the card", wanted="550", supported="470")


@dataclass(frozen=True)
class Fake:
    """A platform's offer, and its target or what loading it raises."""

    offer: Offer
    target: object


def fake(name: str, detect: Callable[[], object], priority: int = 0) -> Fake:
    """A platform whose ``detect`` calls the function given."""

    class FakePlatform(Platform):
        @classmethod
        def detect(cls) -> DeviceInfo | Reason:
            return detect()  # type: ignore[return-value]  # some of these lie, as plugins may

        @property
        def memory(self) -> Memory:
            raise NotImplementedError

        def activate(self, index: int) -> torch.device:
            raise AssertionError("choosing a platform must not create a context")

        def synchronize(self) -> None:
            raise AssertionError("choosing a platform must not touch the device")

    FakePlatform.name = name
    return Fake(offer(name, family="platform", priority=priority, plugin=name), FakePlatform)


def device(name: str, accelerator: bool = True) -> DeviceInfo:
    return DeviceInfo(name, f"{name.title()} 1", name, f"{name}1", accelerator=accelerator)


def raises(error: Exception) -> Callable[[], object]:
    def detect() -> object:
        raise error

    return detect


CPU = fake("cpu", lambda: device("cpu", accelerator=False))
ACME = fake("acme", lambda: device("acme"))
RIVAL = fake("rival", lambda: device("rival"), priority=9)
ABSENT = fake("absent", lambda: NOTHING_HERE)
OUT_OF_ORDER = fake("broken", lambda: BROKEN)
UNLOADABLE = Fake(offer("broken", family="platform", plugin="broken"), ImportError("libacme.so: cannot open"))
NO_PLATFORM = Fake(offer("broken", family="platform", plugin="broken"), object)
BROKEN_KINDS = {
    "unusable device": (OUT_OF_ORDER, "driver", "the driver is older than the card (wanted 550, supported 470)"),
    "detect raises": (fake("broken", raises(OSError("no sysfs"))), "detect-failed", "OSError: no sysfs"),
    "detect answers None": (fake("broken", lambda: None), "detect-failed", "got None"),
    "detect answers nonsense": (fake("broken", lambda: True), "detect-failed", "got True"),
    "cannot be loaded": (UNLOADABLE, "load-failed", "libacme.so: cannot open"),
    "is no Platform": (NO_PLATFORM, "load-failed", "broken_hp:broken is no Platform"),
}


def plugins(*fakes: Fake, presets: tuple[DeviceInfo, ...] = ()) -> FakePlugins:
    return FakePlugins([f.offer for f in fakes], {f.offer.contribution.name: f.target for f in fakes}, presets)


def choose(*fakes: Fake, name: str | None = None) -> PlatformChoice:
    return choose_platform(plugins(*fakes), Settings({"platform": name} if name else {}))


def test_an_accelerator_comes_before_a_cpu() -> None:
    for order in ((CPU, ABSENT, ACME), (ACME, ABSENT, CPU)):
        choice = choose(*order)
        assert (choice.platform.name, choice.device) == ("acme", device("acme"))
        assert choice.plan.offer == ACME.offer
        assert choice.plan.entries[0].rule == "priority"
        assert reasons(choice.plan) == {"absent": [NO_DEVICE], "cpu": ["comes-after"]}


def test_a_cpu_serves_where_nothing_else_is_here() -> None:
    choice = choose(CPU, ABSENT)
    assert choice.device.platform == "cpu"
    assert reasons(choice.plan) == {"absent": [NO_DEVICE]}
    alone = choose(CPU)
    assert alone.plan.entries[0].rule == "only candidate"
    assert not alone.plan.rejected


def test_two_accelerators_are_an_error_that_names_both() -> None:
    with pytest.raises(PlatformError) as caught:
        choose(CPU, ACME, RIVAL)
    text = str(caught.value)
    assert "acme (Acme 1)" in text
    assert "rival (Rival 1)" in text
    assert "--platform NAME" in text
    assert choose(CPU, ACME, RIVAL, name="acme").device.platform == "acme"


def test_two_cpus_go_by_priority_then_name() -> None:
    slow, c, b = (fake(n, partial(device, n, False), p) for n, p in (("a_slow", 0), ("c", 3), ("b", 3)))
    for order in ((slow, c, b), (b, c, slow)):
        choice = choose(*order)
        assert choice.device.platform == "b"
        assert reasons(choice.plan) == {"c": ["comes-after"], "a_slow": ["comes-after"]}


@pytest.mark.parametrize(("broken", "code", "fact"), BROKEN_KINDS.values(), ids=BROKEN_KINDS)
def test_what_is_broken_never_becomes_a_cpu_in_silence(broken: Fake, code: str, fact: str) -> None:
    for order in ((CPU, broken), (broken, CPU), (ABSENT, broken, CPU)):
        with pytest.raises(PlatformError) as caught:
            choose(*order)
        assert "\n  broken: " in str(caught.value)
        assert fact in str(caught.value)
        assert "falling back to cpu would hide it" in str(caught.value)
        assert "ask for --platform cpu" in str(caught.value)
        assert NOTHING_HERE.message not in str(caught.value)
    on_demand = choose(CPU, broken, name="cpu")
    assert on_demand.device.platform == "cpu"
    assert reasons(on_demand.plan) == {"broken": ["not-asked-for"]}
    with pytest.raises(SelectionError, match="--platform broken: it cannot be used here") as refused:
        choose(CPU, broken, name="broken")
    assert [r.code for r in refused.value.rejected["broken"]] == [code]
    assert fact in str(refused.value)


@pytest.mark.parametrize(("broken", "code", "fact"), BROKEN_KINDS.values(), ids=BROKEN_KINDS)
def test_what_is_broken_does_not_stop_an_accelerator(broken: Fake, code: str, fact: str) -> None:
    choice = choose(CPU, broken, ACME)
    assert choice.device.platform == "acme"
    assert reasons(choice.plan) == {"broken": [code], "cpu": ["comes-after"]}
    assert any(fact in str(r.reasons[0]) for r in choice.plan.rejected)


def test_the_fallback_that_is_named_is_the_one_that_would_serve() -> None:
    better = fake("tuned_cpu", lambda: device("tuned_cpu", False), priority=5)
    with pytest.raises(PlatformError, match="falling back to tuned_cpu would hide it"):
        choose(CPU, better, OUT_OF_ORDER)


def test_the_flag_asks_that_platform_alone() -> None:
    never = Fake(ACME.offer, AssertionError("asked a platform that nobody asked for"))
    fakes = plugins(CPU, never, ABSENT)
    choice = choose_platform(fakes, Settings({"platform": "cpu"}))
    assert (choice.device.platform, choice.plan.entries[0].rule) == ("cpu", "flag")
    assert fakes.loaded == ["cpu"]
    assert reasons(choice.plan) == {"acme": ["not-asked-for"], "absent": ["not-asked-for"]}


def test_the_flag_for_a_device_that_is_not_here() -> None:
    with pytest.raises(SelectionError, match="absent: no such card") as caught:
        choose(CPU, ABSENT, name="absent")
    assert list(caught.value.rejected) == ["absent"]


def test_the_flag_for_an_unknown_name() -> None:
    with pytest.raises(UnknownNameError) as caught:
        choose(CPU, ACME, name="acne")
    assert (caught.value.nearest, caught.value.known) == ("acme", ("acme", "cpu"))
    assert "docs/running.md, 'Install', names the packages of this project" in str(caught.value)
    assert "hardpoint-acne" not in str(caught.value), "a guessed name is anybody's to publish"


def test_no_platform_at_all() -> None:
    with pytest.raises(PlatformError, match=r"install a platform plugin \(docs/running\.md, 'Install'\)$"):
        choose()
    with pytest.raises(PlatformError) as caught:
        choose(ABSENT, OUT_OF_ORDER)
    assert "absent: no such card" in str(caught.value)
    assert "broken: the driver is older" in str(caught.value)


# Presets


PRESET = DeviceInfo("acme", "acme-2", "acme", "acme2", memory_bytes=64 << 30, present=False)


def test_a_preset_stands_for_hardware_that_is_not_here() -> None:
    absent = fake("acme", raises(AssertionError("a preset detects nothing")))
    choice = preset_choice(plugins(CPU, absent, presets=(PRESET,)), Settings(), "acme-2")
    assert choice.device is PRESET
    assert choice.platform is absent.target
    assert choice.plan.entries[0].rule == "flag"
    (rejection,) = choice.plan.rejected
    assert (rejection.offer, str(rejection.reasons[0])) == (CPU.offer, "--device acme-2 was asked for")


def test_an_unknown_preset() -> None:
    with pytest.raises(UnknownNameError, match="unknown device 'acme-3'; did you mean 'acme-2'"):
        preset_choice(plugins(CPU, ACME, presets=(PRESET,)), Settings(), "acme-3")
    with pytest.raises(UnknownNameError, match=r"known: none\. A package brings it\."):
        preset_choice(plugins(CPU), Settings(), "acme-2")


def test_a_preset_of_a_platform_that_nobody_offers() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown platform 'acme'; known: cpu\."):
        preset_choice(plugins(CPU, presets=(PRESET,)), Settings(), "acme-2")


def test_a_detect_that_hangs_is_passed_over_unless_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(platform_choice, "DETECT_SECONDS", 0.05)
    over = threading.Event()

    def hang() -> object:
        over.wait(60)
        return NOTHING_HERE

    cpu = fake("cpu", lambda: device("cpu", accelerator=False))
    try:
        with caplog.at_level(logging.WARNING):
            assert choose(fake("stuck", hang), cpu).device.platform == "cpu"
        (warning,) = (r.getMessage() for r in caplog.records)
        assert "platform stuck is passed over" in warning
        assert "plugin stuck, did not return within 0.05 s; it is at " in warning
        assert "threading.py, line" in warning
        with pytest.raises(SelectionError, match="--platform stuck: it cannot be used here") as caught:
            choose(fake("stuck", hang), cpu, name="stuck")
        assert "did not return within" in str(caught.value)
    finally:
        over.set()


def test_a_detect_that_exits_ends_nothing_else() -> None:
    def leave() -> object:
        raise SystemExit(3)

    cpu = fake("cpu", lambda: device("cpu", accelerator=False))
    with pytest.raises(PlatformError, match="plugin leaving, raised SystemExit"):
        choose(fake("leaving", leave), cpu)
