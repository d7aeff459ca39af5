"""A head that a checkpoint stores although its config ties it to the embedding."""

from __future__ import annotations

import torch

from hardpoint.checkpoint.reading import WeightNames
from hardpoint_plugin_api import CheckpointError

_HEAD = "lm_head.weight"
_SLOTS = ("head.linear.weight", "head.layer.linear.weight")
"""Of our own models, and of those that run by Transformers' code."""
_ROWS = 64


class TiedHead:
    """Compares a stored head, which fills no slot, with the embedding that stands for it, as tensors stream by.

    Transformers compares them too, and does not tie those that differ (``tie_weights`` of modeling_utils.py, 5.23).
    Up to 64 evenly spaced rows of each [vocab, hidden] are copied, on the tensor's own device.
    """

    def __init__(self, names: WeightNames, title: str, stored: frozenset[str] | None) -> None:
        """``stored`` are the tensors that will stream by, None where that is not known: without a head nothing is
        compared, and nothing of an embedding is read that the rank does not hold."""
        heads = [name for name, place in names.items() if place is None and name.endswith(_HEAD)]
        heads = [name for name in heads if stored is None or name in stored]
        embeddings = [name for name, place in names.items() if isinstance(place, str) and place.endswith(_SLOTS)]
        self.compared = {*heads, *embeddings} if heads and embeddings else set[str]()
        """The tensors of which rows are looked at."""
        self._title = title
        self._seen: dict[str, tuple[torch.Size, torch.Tensor]] = {}

    def see(self, name: str, tensor: torch.Tensor) -> None:
        """Take the next tensor into account. Raises CheckpointError, naming both, for a head unlike the embedding."""
        if name not in self.compared:
            return
        step = -(-len(torch.atleast_1d(tensor)) // _ROWS) or 1
        rows = torch.atleast_1d(tensor)[::step].clone()
        for other, (shape, sample) in self._seen.items():
            if shape != tensor.shape or not torch.equal(sample.float(), rows.float()):
                raise CheckpointError(
                    f"{self._title}: {other!r} and {name!r} differ, though the config ties the head to the embedding; "
                    'set "tie_word_embeddings": false in the config to use both, or remove the head'
                )
        self._seen[name] = (tensor.shape, rows)
