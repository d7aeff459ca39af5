"""Why a candidate cannot, or will not, serve a request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reason:
    """One reason: a stable ``code`` for programs, a sentence for people, and what was wanted beside what there is.

    ``fix``, where there is one, is a command or setting that removes the reason.
    """

    code: str
    message: str
    wanted: str | None = None
    supported: str | None = None
    fix: str | None = None

    def __str__(self) -> str:
        text = self.message
        if self.wanted is not None or self.supported is not None:
            text += f" (wanted {self.wanted or 'nothing'}, supported {self.supported or 'nothing'})"
        if self.fix:
            text += f"; fix: {self.fix}"
        return text
