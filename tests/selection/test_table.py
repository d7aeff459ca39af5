"""The frozen table of selections, its digest, and the tuning file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hardpoint.plugin_host import Offer
from hardpoint.selection import Plan, SelectionTable, TuningFile, Verdict
from hardpoint.selection.tuning import versions_of
from hardpoint_plugin_api import ConfigError, LinearWorkload, OpWorkload, TokensRequirement
from tests.selection.fakes import MATMUL, TOY, offer, select

BEST, OTHER = offer("best", priority=9), offer("other", priority=1, platforms=("toy",))
SMALL = offer("small", priority=20, tokens=TokensRequirement(max=8))
BASE = select(BEST, OTHER)


def digest(*plans: Plan) -> str:
    return SelectionTable(plans).digest


def test_a_digest_is_short_and_repeatable() -> None:
    assert digest(BASE) == digest(select(OTHER, BEST))
    assert len(digest(BASE)) == 16
    int(digest(BASE), 16)
    assert digest() != digest(BASE)


@pytest.mark.parametrize(
    "plan",
    [
        select(BEST),
        select(BEST, OTHER, choice="best"),
        select(BEST, OTHER, tuned="best"),
        select(BEST, OTHER, offer("far", priority=99, platforms=("other",))),
        select(BEST, OTHER, offer("loser", tokens=TokensRequirement(max=3, phase="decode"))),
        select(offer("best", priority=10), OTHER),
    ],
)
def test_the_digest_stays_where_the_same_serve(plan: Plan) -> None:
    assert digest(plan) == digest(BASE)


OP = OpWorkload(of="norm", dtype="float32")


def op_plan(of: str) -> Plan:
    return select(offer("best", family="op", of=of), workload=OpWorkload(of=of, dtype="float32"))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ([BASE], [select(BEST, OTHER, choice="other")]),
        ([BASE], [select(BEST, OTHER, SMALL)]),
        ([select(BEST, SMALL)], [select(BEST, offer("small", priority=20, tokens=TokensRequirement(max=9)))]),
        ([BASE], [select(BEST, workload=LinearWorkload(dtype="float32", in_features=8, out_features=5))]),
        ([BASE], [select(offer("best", plugin="rival"))]),
        ([BASE], [select(offer("best", version="1.1"))]),
        ([op_plan("norm")], [op_plan("silu")]),
        ([BASE], [BASE, op_plan("norm")]),
    ],
    ids=["winner", "range added", "bound", "workload", "plugin", "version", "of", "one more"],
)
def test_the_digest_changes_with_who_serves_what(left: list[Plan], right: list[Plan]) -> None:
    assert digest(*left) != digest(*right)


def test_a_table_as_json() -> None:
    far = offer("far", priority=99, platforms=("other",), plugin="rival")
    table = SelectionTable([select(BEST, SMALL, far), op_plan("norm")])
    data = table.to_json()
    assert json.loads(json.dumps(data)) == data
    assert data["digest"] == table.digest
    rows = data["rows"]
    assert isinstance(rows, list)
    assert [(r["family"], r["of"], r["range"], r["chosen"]) for r in rows] == [
        ("linear", None, "1-8", "small"),
        ("linear", None, "9+", "best"),
        ("op", "norm", "any", "best"),
    ]
    assert rows[0] == {
        "family": "linear",
        "of": None,
        "workload": "dtype=float32 in_features=8 out_features=4",
        "range": "1-8",
        "chosen": "small",
        "plugin": "acme",
        "version": "1.0",
        "rule": "priority",
        "rejected": [
            {
                "name": "far",
                "plugin": "rival",
                "reasons": [
                    {
                        "code": "platform",
                        "message": "it is for another platform",
                        "wanted": "toy",
                        "supported": "other",
                    }
                ],
            }
        ],
    }
    assert rows[2]["rejected"] == []
    assert rows[2]["rule"] == "only candidate"


# The tuning file


ENTRY = {"device": TOY.name, "family": "linear", "of": None, "workload": MATMUL.key(), "name": "other"}


def read(folder: Path, data: object) -> TuningFile:
    path = folder / "tuned.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return TuningFile.read(path)


def test_reading_a_tuning_file(tmp_path: Path) -> None:
    of_op = {**ENTRY, "family": "op", "of": "norm", "workload": OP.key(), "name": "fast"}
    tuning = read(tmp_path, {"schema": 1, "winners": [ENTRY, of_op]})
    assert tuning.verdicts(TOY, MATMUL) == (Verdict("other"),)
    assert tuning.verdicts(TOY, OP) == (Verdict("fast"),)
    assert not tuning.verdicts(TOY, OpWorkload(of="silu", dtype="float32"))
    assert not tuning.verdicts(TOY, LinearWorkload(dtype="float32"))
    assert not read(tmp_path, {"schema": 1, "winners": []}).winners


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    key = (TOY.name, "linear", None, MATMUL.key())
    few = Verdict("b", TokensRequirement(max=8), {1: {"a": 2.5, "b": 1.0}}, {"torch": "2.13.0"}, {"threads": "4"})
    tuning = TuningFile({key: (few, Verdict("a", TokensRequirement(min=9))), ("Toy 2", *key[1:]): (Verdict("a"),)})
    tuning.write(tmp_path / "tuned.json")
    assert TuningFile.read(tmp_path / "tuned.json") == tuning
    with pytest.raises(ConfigError, match=r"tuning file .*absent/tuned\.json: cannot be written"):
        tuning.write(tmp_path / "absent" / "tuned.json")


def test_measurements_of_other_versions_prove_nothing(caplog: pytest.LogCaptureFixture) -> None:
    key = (TOY.name, "linear", None, MATMUL.key())
    here = versions_of(["torch", "hardpoint-core", "absent-distribution"])
    assert set(here) == {"torch", "hardpoint-core"}
    fresh, stale = Verdict("a", TokensRequirement(max=8), versions=here), Verdict("b", versions={"torch": "1.0"})
    tuning = TuningFile({key: (fresh, stale), (*key[:3], "dtype=float16"): (stale,)})
    assert tuning.for_engine(TOY, "tuned.json") == TuningFile({key: (fresh,)})
    (record,) = caplog.records
    assert "tuning file tuned.json: what was measured with torch 1.0 is left aside" in record.getMessage()
    caplog.clear()
    kept = TuningFile({key: (fresh, Verdict("b")), ("Toy 2", *key[1:]): (stale,)}).for_engine(TOY, "tuned.json")
    assert kept == TuningFile({key: (fresh, Verdict("b"))})
    assert not caplog.records, "what was measured on other devices is no loss"
    assert not TuningFile({("Toy 2", *key[1:]): (fresh,)}).for_engine(TOY, "tuned.json").winners
    assert "tuned.json holds nothing of this device, Toy 1, but of: Toy 2" in caplog.text


def test_measurements_of_another_context_are_left_aside(caplog: pytest.LogCaptureFixture) -> None:
    key, other = (TOY.name, "linear", None, MATMUL.key()), (TOY.name, "linear", None, "dtype=float16")
    two, four = Verdict("a", context={"threads": "2"}), Verdict("b", context={"threads": "4"})
    tuning = TuningFile({key: (two, four), other: (two,)})
    assert tuning.for_engine(TOY, "tuned.json", {"threads": "4"}) == TuningFile({key: (four,)})
    (record,) = caplog.records
    assert "measured with threads 2 is left aside, since this engine has threads 4; " in record.getMessage()
    caplog.clear()
    assert tuning.for_engine(TOY, "tuned.json", {"threads": "2"}) == TuningFile({key: (two,), other: (two,)})
    assert tuning.for_engine(TOY, "tuned.json") == TuningFile({key: (four,), other: (two,)}), "what was written last"
    assert not caplog.records
    assert not tuning.for_engine(TOY, "tuned.json", {}).winners
    assert "since this engine has no such thing" in caplog.text


def test_measurements_that_say_no_context_are_named(caplog: pytest.LogCaptureFixture) -> None:
    key = (TOY.name, "linear", None, MATMUL.key())
    by_hand, measured = TuningFile({key: (Verdict("a"),)}), TuningFile({key: (Verdict("a", measured={1: {"a": 2.5}}),)})
    assert by_hand.for_engine(TOY, "tuned.json", {"threads": "4"}) == by_hand
    assert measured.for_engine(TOY, "tuned.json", {}) == measured
    assert not caplog.records
    assert measured.for_engine(TOY, "tuned.json", {"threads": "4"}) == measured
    assert "tuned.json does not say whether it was measured with threads 4; hardpoint tune" in caplog.text


@pytest.mark.parametrize(
    ("data", "fact"),
    [
        ("{", "cannot be read"),
        ([], 'expected {"schema": 1'),
        ({"winners": []}, 'expected {"schema": 1'),
        ({"schema": 2, "winners": []}, 'expected {"schema": 1'),
        ({"schema": 1, "winners": {}}, 'expected {"schema": 1'),
        ({"schema": 1, "winners": [ENTRY, 3]}, "entry 2 must have exactly the keys device, family, of, workload, name"),
        ({"schema": 1, "winners": [{**ENTRY, "speed": 3}]}, "entry 1 must have exactly"),
        ({"schema": 1, "winners": [{k: v for k, v in ENTRY.items() if k != "of"}]}, "entry 1 must have exactly"),
        ({"schema": 1, "winners": [ENTRY, {**ENTRY, "name": None}]}, "entry 2 must hold texts"),
        ({"schema": 1, "winners": [{**ENTRY, "device": ["Toy 1"]}]}, "entry 1 must hold texts"),
        ({"schema": 1, "winners": [{**ENTRY, "of": 3}]}, "entry 1 must hold texts"),
        ({"schema": 1, "winners": [{**ENTRY, "family": "liner"}]}, "entry 1: unknown family 'liner'"),
        ({"schema": 1, "winners": [{**ENTRY, "tokens": {"min": 9, "max": 8}}]}, "entry 1: requirement 'tokens'"),
        ({"schema": 1, "winners": [{**ENTRY, "tokens": {"phase": "decode"}}]}, "only attention tells phases apart"),
        ({"schema": 1, "winners": [{**ENTRY, "family": "model", "tokens": {"max": 8}}]}, "serves every step alike"),
        ({"schema": 1, "winners": [{**ENTRY, "versions": {"torch": 2}}]}, "entry 1: versions must be texts"),
        ({"schema": 1, "winners": [{**ENTRY, "context": {"threads": 2}}]}, "entry 1: context must be texts"),
        ({"schema": 1, "winners": [{**ENTRY, "measured": {"one": {"other": 1.0}}}]}, "entry 1: measured must be"),
        ({"schema": 1, "winners": [{**ENTRY, "measured": {"1": {"other": "1.0"}}}]}, "entry 1: measured must be"),
    ],
)
def test_a_bad_tuning_file_is_named(tmp_path: Path, data: object, fact: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, data)
    assert fact in str(caught.value)
    assert str(tmp_path / "tuned.json") in str(caught.value)


def test_unreadable_tuning_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.json: the tuning file cannot be read: No such file"):
        TuningFile.read(tmp_path / "absent.json")
    (tmp_path / "latin.json").write_bytes(b'{"schema": "\xff"}')
    with pytest.raises(ConfigError, match=r"latin\.json: the tuning file cannot be read: it is not JSON"):
        TuningFile.read(tmp_path / "latin.json")


def test_a_plan_of_several_winners_has_no_single_one() -> None:
    assert BASE.offer == BEST
    several: Plan = select(BEST, SMALL)
    first: Offer = several.entries[0].offer
    assert first == SMALL
    with pytest.raises(AssertionError, match="several winners"):
        _ = several.offer
