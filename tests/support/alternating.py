"""Parameters of two kinds, of which the default suite tries each value and the long sweeps each pair."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest


def alternating(rows: Mapping[str, Any], columns: Mapping[str, Any]) -> Any:
    """Values of all pairs for ``pytest.mark.parametrize``, as on a chessboard: by day the white squares.

    With at least two columns each row is tried by day, and with at least two rows each column.
    """
    return [
        pytest.param(row, column, id=f"{name}-{other}", marks=[pytest.mark.nightly] * ((i + j) % 2))
        for i, (name, row) in enumerate(rows.items())
        for j, (other, column) in enumerate(columns.items())
    ]
