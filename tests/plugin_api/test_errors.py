"""Errors name the value, the offender and the alternatives; when all fail, every reason is there."""

from __future__ import annotations

import pickle

import pytest

import hardpoint_plugin_api as api
from hardpoint_plugin_api import HardpointError, Reason, SelectionError, UnknownNameError, nearest


@pytest.mark.parametrize(
    ("name", "known", "wanted"),
    [
        ("atention", ["attention", "linear", "op"], "attention"),
        ("Acme-Paged", ["acme_paged", "acme_flash"], "acme_paged"),
        ("q-k-n-r", ["q_k_n_r"], "q_k_n_r"),
        ("q_k_n_r", ["q-k-n-r"], "q-k-n-r"),
        ("ACME", ["acme"], "acme"),
        ("acme_paged", ["Acme-Paged"], "Acme-Paged"),
        ("zebra", ["attention", "linear"], None),
        ("x", [], None),
        ("", ["attention"], None),
    ],
)
def test_nearest(name: str, known: list[str], wanted: str | None) -> None:
    assert nearest(name, known) == wanted


def test_an_unknown_name_with_a_near_one() -> None:
    error = UnknownNameError("op", "rms-nrom", iter({"silu", "rms_norm"}), "See `hardpoint ops list`.")
    assert (error.kind, error.name, error.known, error.nearest) == ("op", "rms-nrom", ("rms_norm", "silu"), "rms_norm")
    assert str(error) == (
        "unknown op 'rms-nrom'; did you mean 'rms_norm'? Known: rms_norm, silu. See `hardpoint ops list`."
    )


def test_an_unknown_name_without() -> None:
    assert str(UnknownNameError("op", "zebra", ["silu"])) == "unknown op 'zebra'; known: silu."
    assert str(UnknownNameError("op", "zebra", [])) == "unknown op 'zebra'; known: none."


def test_an_unknown_name_among_many() -> None:
    """Where a place lists all names, the message has the nearest ones and that place."""
    known = ["block_size", "block_sizes", "model", "seed"]
    error = UnknownNameError("setting", "blok_size", known, listed_by="`hardpoint generate --help`")
    assert str(error) == (
        "unknown setting 'blok_size'; did you mean 'block_size' or 'block_sizes'? "
        "All names: `hardpoint generate --help`."
    )
    error = UnknownNameError("setting", "zebra", known, listed_by="`--help`")
    assert (error.nearest, str(error)) == (None, "unknown setting 'zebra'; all names: `--help`.")


def test_a_selection_error_lists_every_reason() -> None:
    rejected = {
        "fast": [Reason("arch", "device architecture not supported", "sm_80", "sm_90"), Reason("dtype", "no float32")],
        "slow": [Reason("package-missing", "package x is not installed", fix="pip install x")],
    }
    error = SelectionError("nothing can serve op norm", dict(rejected))
    assert str(error).splitlines() == [
        "nothing can serve op norm",
        "  fast: device architecture not supported (wanted sm_80, supported sm_90)",
        "  fast: no float32",
        "  slow: package x is not installed; fix: pip install x",
    ]
    assert error.rejected == rejected
    assert SelectionError("bare").rejected == {}
    assert str(SelectionError("bare")) == "bare"


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (Reason("c", "no"), "no"),
        (Reason("c", "no", wanted="a"), "no (wanted a, supported nothing)"),
        (Reason("c", "no", supported="b"), "no (wanted nothing, supported b)"),
        (Reason("c", "no", "a", "b", "do"), "no (wanted a, supported b); fix: do"),
        (Reason("c", "no", fix="do"), "no; fix: do"),
    ],
)
def test_a_reason_as_text(reason: Reason, text: str) -> None:
    assert str(reason) == text


@pytest.mark.parametrize(
    ("name", "parents"),
    [
        ("ConfigError", (HardpointError, ValueError)),
        ("UnknownNameError", (api.ConfigError,)),
        ("PluginError", (HardpointError,)),
        ("ManifestError", (api.PluginError,)),
        ("PluginConflictError", (api.PluginError,)),
        ("PluginLoadError", (api.PluginError,)),
        ("SelectionError", (HardpointError,)),
        ("PlatformError", (HardpointError,)),
        ("CheckpointError", (HardpointError,)),
        ("RequestError", (HardpointError, ValueError)),
        ("CapacityError", (HardpointError,)),
        ("EngineError", (HardpointError,)),
        ("EngineDeadError", (api.EngineError,)),
    ],
)
def test_the_tree_is_as_drawn(name: str, parents: tuple[type, ...]) -> None:
    assert getattr(api, name).__bases__ == parents


def test_the_tree_is_drawn_whole() -> None:
    errors = {n for n in api.__all__ if isinstance(v := getattr(api, n), type) and issubclass(v, Exception)}
    drawn = api.errors.__doc__ or ""
    assert len(errors) == 14
    assert not [name for name in errors if name not in drawn]


def test_every_error_survives_pickling() -> None:
    errors = [
        UnknownNameError("op", "rms-nrom", {"silu", "rms_norm"}),
        SelectionError("nothing can serve", {"fast": [Reason("dtype", "no float32")]}),
        api.RequestError("the prompt is empty"),
    ]
    for error in errors:
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert (str(copy), vars(copy)) == (str(error), vars(error))
