"""A model's own plan for several ranks, by Transformers' names, as styles that our layers follow."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from hardpoint.parallel.shards import even_shard
from hardpoint_plugin_api import CheckpointError, RankGroup, ShardPlan

Style = Literal["replicated", "colwise", "rowwise", "colwise_gather_output", "rowwise_split_input"]

_LINEAR: dict[str, Style] = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_gather_output": "colwise_gather_output",
    "colwise_rep": "colwise_gather_output",  # before Transformers 5
    "rowwise_split_input": "rowwise_split_input",
    "rowwise_rep": "rowwise_split_input",
    "replicated_with_grad_allreduce": "replicated",
}
_NUMBER = re.compile(r"\.\d+(?=\.|$)")


class TensorPlan:
    """The plan of one model on the ranks of ``group``; empty for one rank, where nothing is divided."""

    def __init__(self, plan: Mapping[str, str] | None, group: RankGroup, path: object) -> None:
        self.group, self._plan, self._path = group, dict(plan or {}) if group.size > 1 else {}, path
        if group.size > 1 and not any("layers" in name or "h.*" in name for name in self._plan):
            raise CheckpointError(
                f"--tensor-parallel-size {group.size}: Transformers has no tensor parallel plan for this model "
                f"({path}); run it on one rank"
            )

    def named(self, module: str) -> str | None:
        """The style of the module or parameter at this path, by Transformers' name."""
        return self._plan.get(_NUMBER.sub(".*", module), self._plan.get(module))

    def linear(self, module: str) -> Style:
        """The style of a linear layer. Raises CheckpointError for one that is not supported."""
        name = self.named(module)
        if name is None:
            return "replicated"
        if name not in _LINEAR:
            raise CheckpointError(
                f"--tensor-parallel-size {self.group.size}: the plan of this model ({self._path}) divides {module} as "
                f"{name!r}, which is not supported; run it on one rank"
            )
        return _LINEAR[name]

    def rows(self, full: int, style: Style, module: str) -> ShardPlan | None:
        """How the output features of a linear layer are divided. Raises ConfigError where they do not divide."""
        return even_shard(full, self.group, f"{module}'s outputs") if style.startswith("colwise") else None

    def columns(self, full: int, style: Style, module: str) -> ShardPlan | None:
        """How its input features are divided."""
        return even_shard(full, self.group, f"{module}'s inputs") if style.startswith("rowwise") else None
