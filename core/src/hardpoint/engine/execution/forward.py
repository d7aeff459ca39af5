"""A model's forward pass over one step: planned on the host, then run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from hardpoint.cache_users import ModelCaches
from hardpoint_plugin_api import AttentionBatch, AttentionMetadata, ForwardStep, GraphEngine, PlatformError


class Model(Protocol):
    """The model that is run: see CausalLM."""

    def hidden(self, inputs: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """ids int64 [T], or states of the stage before, -> hidden states [T, hidden], or states to hand on."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden] -> [N, vocab]."""
        ...


@dataclass
class PiecewiseStep(ForwardStep):
    """A step that cache users cut where they use their caches. Each run of its graph has ``metadata`` of its own.

    ``interrupted_by`` are the users that have cut it.
    """

    engine: GraphEngine = field(kw_only=True)
    interrupted_by: set[int] = field(default_factory=set)

    def interrupt(self, user: int, call: Callable[..., None], *tensors: torch.Tensor) -> None:
        """See ForwardStep. ``call`` runs long after the step was captured, once in each run."""
        self.interrupted_by.add(user)
        self.engine.opaque(lambda *given: call(self.caches[user], self.metadata[user], *given), *tensors)


_MOST_STATES = 8
"""Pages of states whose contents a comparison of steps holds; results are compared for all requests."""


def _numbers(view: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """A small number for each of ``pages``, int64 [n], in the shape of their contents in ``view``."""
    numbers = (pages % 7).to(view.dtype)
    if view.is_floating_point():
        numbers = numbers / 8 - 0.375
    return numbers.view(-1, *[1] * (view.dim() - 1))


class Places(NamedTuple):
    """Where T tokens of one cache group are stored: the pages, int64 [P], and of each token the row among these and the
    offset in its page, int64 [T]."""

    pages: torch.Tensor
    rows: torch.Tensor
    offsets: torch.Tensor


class Forward:
    """A model over its caches. ``caches`` holds the views of each cache user, in order."""

    def __init__(self, model: Model, users: ModelCaches, caches: list[dict[str, torch.Tensor]]) -> None:
        self.model, self.caches = model, caches
        self._users, self._groups = users.users, users.plan_groups()
        self._cache_groups = users.cache_groups()

    def plan(self, batches: Sequence[AttentionBatch]) -> list[AttentionMetadata]:
        """Have a step planned; ``batches`` has what each cache group sees. Returns each user's metadata."""
        metadata: list[AttentionMetadata] = [AttentionMetadata(batches[0])] * len(self._users)
        for group in self._groups:
            planned = self._users[group.users[0]].planner.plan(batches[group.cache_group])
            for number in group.users:
                metadata[number] = planned
        return metadata

    def tokens(self, metadata: Sequence[AttentionMetadata]) -> Hashable:
        """The compatibility tokens of a planned step, all groups' together."""
        return tuple(metadata[group.users[0]].token for group in self._groups)

    def copy_pages(self, counts: Mapping[int, int], pages: torch.Tensor) -> None:
        """Copy pages of the caches.

        ``pages``, int64 [2, C], are sources and targets: ``counts`` says how many are of which cache group, in order.
        """
        first = 0
        for group, count in counts.items():
            sources, targets = pages[:, first : first + count]
            first += count
            for view in self._views(group):
                view[targets] = view[sources]

    def keep_states(self, slots: Sequence[torch.Tensor], block_size: int, *, is_trial: bool) -> Callable[[], None]:
        """Return a function that brings back the states of now at ``slots``, int32 [T] for each cache group.

        A step that runs twice, to compare results, begins from one state both times. A trial, whose pages nobody uses,
        begins from numbers that follow from the page. They are written now, so that no copies are held: states of many
        requests are as large as what the cache leaves free.
        """
        kept = []
        for group, at in enumerate(slots):
            if self._cache_groups[group].retention.per_sequence:
                pages = torch.unique(at.long() // block_size)
                content = _numbers if is_trial else torch.Tensor.__getitem__
                kept += [(view, pages, content(view, pages)) for view in self._views(group)]

        def restore() -> None:
            for view, pages, content in kept:
                view[pages] = content

        if is_trial:
            restore()
        return restore

    def _views(self, group: int) -> Iterator[torch.Tensor]:
        """The views of all users of a cache group, elements of one byte as such: few operators take 8-bit floats."""
        for number in self._cache_groups[group].users:
            for view in self.caches[number].values():
                yield view.view(torch.uint8) if view.element_size() == 1 else view

    def places(self, slots: Sequence[torch.Tensor], block_size: int) -> list[Places]:
        """Where ``stored`` finds what steps store at ``slots``, int32 [T] for each cache group, of states a few.

        Waits for the device.
        """
        found = []
        for group, at in zip(self._cache_groups, slots, strict=True):
            # On the host: the operator's first call on a device takes a fifth of a second.
            pages, rows = (x.to(at.device) for x in torch.unique(at.cpu().long() // block_size, return_inverse=True))
            if group.retention.per_sequence:
                pages = pages[:: -(-len(pages) // _MOST_STATES)]
            found.append(Places(pages, rows, at.long() % block_size))
        return found

    def stored(self, places: Sequence[Places]) -> list[torch.Tensor]:
        """Copies of each user's planes, [T, *plane.shape], or states at ``places``, by cache group."""
        found: list[torch.Tensor] = []
        for group, (pages, rows, offsets) in zip(self._cache_groups, places, strict=True):
            for number in group.users:
                planes = self._users[number].layout.to_logical(self.caches[number], pages).values()
                if group.retention.per_sequence:
                    found += planes
                else:
                    found += [x[rows, offsets] for x in planes]
        return found

    def hidden(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        metadata: Sequence[AttentionMetadata],
        adapters: torch.Tensor | None = None,
        replica_tokens: Sequence[int] = (),
    ) -> torch.Tensor:
        """Run the model, see Model.hidden; positions int64 [T], the others as in ForwardStep. Writes the caches."""
        step = ForwardStep(positions, positions, self.caches, metadata, adapters, replica_tokens)
        return self.model.hidden(inputs, step)

    def piecewise(
        self,
        positions: torch.Tensor,
        metadata: Sequence[AttentionMetadata],
        engine: GraphEngine,
        adapters: torch.Tensor | None = None,
    ) -> PiecewiseStep:
        """A step that ``engine`` captures in pieces."""
        return PiecewiseStep(positions, positions, self.caches, metadata, adapters, engine=engine)

    def hidden_piecewise(self, inputs: torch.Tensor, step: PiecewiseStep) -> torch.Tensor:
        """As ``hidden``. Raises PlatformError where a layer uses its cache without interrupting the step."""
        hidden = self.model.hidden(inputs, step)
        if len(step.interrupted_by) != len(step.metadata):
            raise PlatformError("a layer uses its cache outside of ForwardStep.interrupt")
        return hidden
