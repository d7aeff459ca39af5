"""API versions: how they are written, and which plugin runs on which host."""

from __future__ import annotations

import pytest

from hardpoint_plugin_api import API_VERSION, ApiVersion, check_api


@pytest.mark.parametrize(
    ("needed", "host", "code"),
    [
        ("0.1", "0.2", "api-too-old"),
        ("0.0", "0.7", "api-too-old"),
        ("0.2", "0.2", None),
        ("0.2", "0.7", None),
        ("0.7", "0.10", None),
        ("0.10", "0.7", "api-too-new"),
        ("0.3", "0.2", "api-too-new"),
        ("1.0", "0.9", "api-too-new"),
        ("0.9", "1.0", None),
        ("0.2", "1.0", None),
        ("1.3", "1.3", None),
        ("1.4", "1.3", "api-too-new"),
        ("2.0", "1.3", "api-too-new"),
        ("1.9", "2.0", None),
        ("1.0", "2.5", None),
        ("0.9", "2.0", "api-too-old"),
        ("0.1", "3.0", "api-too-old"),
        ("1.9", "3.0", "api-too-old"),
        ("2.0", "3.0", None),
    ],
)
def test_a_host_runs_its_major_and_the_one_before(needed: str, host: str, code: str | None) -> None:
    reason = check_api(ApiVersion.parse(needed), ApiVersion.parse(host))
    assert (reason.code if reason else None) == code
    if reason:
        assert reason.wanted == needed
        assert host in str(reason.supported)
        assert reason.fix
        assert ("hardpoint-core" in reason.fix) == (code == "api-too-new")


def test_the_range_of_an_old_plugin_is_named() -> None:
    reason = check_api(ApiVersion(0, 9), ApiVersion(2, 4))
    assert reason is not None
    assert reason.supported == "1.0 to 2.4"


def test_this_host_is_the_default() -> None:
    assert check_api(API_VERSION) is None
    assert check_api(ApiVersion(API_VERSION.major, API_VERSION.minor + 1)) is not None


@pytest.mark.parametrize("text", ["0.1", "1.0", "0.10", "12.34"])
def test_versions_as_text(text: str) -> None:
    assert str(ApiVersion.parse(text)) == text


def test_versions_are_ordered_as_numbers() -> None:
    texts = ["1.2", "0.10", "0.9", "1.0", "2.0"]
    assert [str(v) for v in sorted(map(ApiVersion.parse, texts))] == ["0.9", "0.10", "1.0", "1.2", "2.0"]


@pytest.mark.parametrize(
    "text", ["", "1", "1.", ".1", "0.1.2", "v0.1", "0.x", "-1.0", "0.1 ", " 0.1", "0,1", "\u0660.\u0661", "\u00b2.0"]
)
def test_anything_else_is_no_version(text: str) -> None:
    with pytest.raises(ValueError, match=r"not of the form MAJOR\.MINOR"):
        ApiVersion.parse(text)
