"""The common part of all-to-alls by a library: the object that ranks make of it."""

from __future__ import annotations

from typing import Any

from hardpoint_plugin_api import All2All, All2AllWorkload, BuildContext, GroupMember


class LibraryAll2All(All2All, GroupMember):
    """An all-to-all by an object of a library's, which ``init`` sets as ``_made``. Layers of one shape share it."""

    capturable = False

    def __init__(self, ctx: BuildContext, workload: All2AllWorkload) -> None:
        super().__init__(ctx, workload)
        assert workload.ranks is not None
        assert workload.num_experts is not None
        assert workload.hidden_size is not None
        self._ranks, self._experts, self._hidden = workload.ranks, workload.num_experts, workload.hidden_size
        self._own = workload.num_experts // workload.ranks
        self._most_tokens = -(-ctx.limits.max_tokens // workload.ranks)
        """Of a rank, in the largest step."""
        self._made: Any = None

    def abort(self) -> None:
        self._made = None

    @property
    def _object(self) -> Any:
        """The library's object. Raises RuntimeError once this rank has left."""
        if self._made is None:
            raise RuntimeError("this rank has left its group")
        return self._made
