"""The table of all selections: frozen before the first step; its digest goes into logs, cache keys and handshakes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from hardpoint.plugin_host import Offer
from hardpoint.selection.plan import Plan, Rejection, Rule
from hardpoint_plugin_api import Reason


@dataclass(frozen=True)
class Row:
    """One line of ``explain``: who serves one range of one request, by which rule, and who does not, and why."""

    family: str
    of: str | None
    workload: str
    range: str
    chosen: str
    plugin: str
    version: str
    rule: Rule
    rejected: tuple[Rejection, ...]
    certified: str | None = None
    """The certificates' standing of the chosen one, where they were read."""
    measured: str | None = None
    """The tuning file's measurement of it."""
    not_asked: str | None = None
    """Why the chosen could not be asked whether it supports the workload; the device is not here."""
    stage: int | None = None
    """The pipeline stage, where there are several."""

    def to_json(self) -> dict[str, object]:
        """This row as plain data."""

        def reason(r: Reason) -> dict[str, str]:
            fields = {"code": r.code, "message": r.message, "wanted": r.wanted, "supported": r.supported, "fix": r.fix}
            return {key: value for key, value in fields.items() if value is not None}

        return {
            "family": self.family,
            "of": self.of,
            "workload": self.workload,
            "range": self.range,
            "chosen": self.chosen,
            "plugin": self.plugin,
            "version": self.version,
            "rule": self.rule,
            **({} if self.measured is None else {"measured": self.measured}),
            **({} if self.certified is None else {"certified": self.certified}),
            **({} if self.not_asked is None else {"not_asked": self.not_asked}),
            **({} if self.stage is None else {"stage": self.stage}),
            "rejected": [
                {
                    "name": r.offer.contribution.name,
                    "plugin": r.offer.plugin,
                    "reasons": [reason(each) for each in r.reasons],
                }
                for r in self.rejected
            ],
        }


class SelectionTable:
    """Every plan of one engine.

    ``certified`` says what certificates show of an offer, ``not_asked`` why its ``supports`` could not be called.
    ``notes`` are the model's own on how it was built.
    """

    def __init__(
        self,
        plans: Iterable[Plan],
        certified: Callable[[Offer], str] | None = None,
        not_asked: Mapping[Offer, str] = MappingProxyType({}),
        notes: Sequence[str] = (),
    ) -> None:
        self.notes = tuple(notes)
        self.rows: tuple[Row, ...] = tuple(
            Row(
                family=plan.workload.family,
                of=plan.workload.of,
                workload=plan.workload.key(),
                range=str(entry.range),
                chosen=entry.offer.contribution.name,
                plugin=entry.offer.plugin,
                version=entry.offer.version,
                rule=entry.rule,
                rejected=plan.rejected,
                certified=certified(entry.offer) if certified else None,
                measured=entry.verdict.evidence() if entry.verdict else None,
                not_asked=not_asked.get(entry.offer),
            )
            for plan in plans
            for entry in plan.entries
        )

    @classmethod
    def of_stages(cls, tables: Sequence[SelectionTable]) -> SelectionTable:
        """The rows of all pipeline stages, given each stage's table."""
        if len(tables) == 1:
            return tables[0]
        whole = cls((), notes=list(dict.fromkeys(note for table in tables for note in table.notes)))
        whole.rows = tuple(replace(row, stage=stage) for stage, table in enumerate(tables) for row in table.rows)
        return whole

    @property
    def digest(self) -> str:
        """The first 16 hex digits of the SHA-256 of all winners: workload, range, contribution, plugin and version.

        The reasons against losers are not hashed.
        """
        return hashlib.sha256(json.dumps(self.serving).encode()).hexdigest()[:16]

    @property
    def serving(self) -> list[list[str | None]]:
        """The choices as plain data, which ranks compare."""
        return [[r.family, r.of, r.workload, r.range, r.chosen, r.plugin, r.version] for r in self.rows]

    def to_json(self) -> dict[str, object]:
        """The whole table as plain data."""
        return {"digest": self.digest, "rows": [row.to_json() for row in self.rows], "notes": list(self.notes)}
