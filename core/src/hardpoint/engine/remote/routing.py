"""Which of several replicas serves a request: the one with the least work before the request's first token."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

CHUNK = 64
"""Tokens of a prompt that are remembered together. Replicas cache smaller blocks; hashing each would take longer."""
OPEN_TOKENS = 128
"""The work of an open request, in tokens of prompt: each one makes the steps of the others longer. So a cached prefix
of 2,048 tokens is worth 16 more open requests on one replica than on another, and no more."""


@dataclass(frozen=True)
class Place:
    """The place of a request: the number of its replica, and how many tokens of its prompt are to be computed there."""

    replica: int
    num_tokens: int


@dataclass
class _Replica:
    """Work that was given to a replica, in tokens, and the chunks of prompts that its cache should hold, oldest first.

    ``num_chunks`` is how many the cache can hold.
    """

    num_chunks: int
    num_open: int = 0
    num_waiting_tokens: int = 0
    chunks: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def num_known(self, hashes: Sequence[int]) -> int:
        """How many chunks at the beginning of a prompt should be cached."""
        return next((number for number, each in enumerate(hashes) if each not in self.chunks), len(hashes))

    def remember(self, hashes: Sequence[int]) -> None:
        """Note that the replica computes these chunks. Chunks that were not used for longest are forgotten, of one
        prompt the last ones first."""
        for each in reversed(hashes):
            self.chunks[each] = None
            self.chunks.move_to_end(each)
        while len(self.chunks) > self.num_chunks:
            self.chunks.popitem(last=False)


class Router:
    """Chooses a replica for each request, and keeps count of the work that each has. For one thread at a time.

    The cost of a replica, in tokens: the prompt tokens that it still has to compute before it reaches the request,
    those of the request that its cache should lack, and OPEN_TOKENS for each open request. The router learns prefixes
    from the requests that it has placed, and asks no replica.
    """

    def __init__(self, cache_tokens: Sequence[int]) -> None:
        """``cache_tokens``: how many tokens the prefix cache of each replica holds; 0 where it has none."""
        self._replicas = [_Replica(tokens // CHUNK) for tokens in cache_tokens]

    def place(self, prompt: Sequence[int], key: object, among: Collection[int]) -> Place:
        """Choose one of the replicas ``among``. Requests share prefixes where their ``key`` is equal, too."""
        hashes = list(_chunk_hashes(prompt, key)) if any(self._replicas[number].num_chunks for number in among) else []

        def cost(number: int) -> tuple[int, int]:
            replica = self._replicas[number]
            work = replica.num_waiting_tokens + OPEN_TOKENS * replica.num_open
            return work - CHUNK * replica.num_known(hashes), replica.num_open

        chosen = min(among, key=cost)
        replica = self._replicas[chosen]
        num_tokens = len(prompt) - CHUNK * replica.num_known(hashes)
        replica.remember(hashes)
        replica.num_open += 1
        replica.num_waiting_tokens += num_tokens
        return Place(chosen, num_tokens)

    def begun(self, place: Place) -> None:
        """Note that the request at ``place`` has its first token."""
        self._replicas[place.replica].num_waiting_tokens -= place.num_tokens

    def ended(self, place: Place) -> None:
        """Note that the request at ``place``, which had begun, has ended."""
        self._replicas[place.replica].num_open -= 1

    def forget(self, number: int) -> None:
        """Forget the prefixes of a replica whose cache is empty again."""
        self._replicas[number].chunks.clear()


def _chunk_hashes(prompt: Sequence[int], key: object) -> Iterator[int]:
    """A hash for each whole chunk, over all tokens up to its end."""
    last = hash(key)
    for start in range(0, len(prompt) - CHUNK + 1, CHUNK):
        last = hash((last, tuple(prompt[start : start + CHUNK])))
        yield last
