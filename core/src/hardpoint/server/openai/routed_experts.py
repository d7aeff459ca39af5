"""Routed experts as answers hold them."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def routed_experts(ids: npt.NDArray[np.int16] | None) -> dict[str, Any] | None:
    """The array of CompletionOutput as ``shape``, ``dtype`` and ``data``: base64 of its elements, little-endian, in
    the order of C. None for a completion that was ended from outside."""
    if ids is None:
        return None
    data = base64.b64encode(ids.astype("<i2").tobytes()).decode()
    return {"shape": list(ids.shape), "dtype": "int16", "data": data}
