"""The bytes of each block's weights, by the headers of a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod

import torch

from hardpoint.checkpoint.reading import Address, first_slot
from hardpoint.dtypes import dtype_of
from hardpoint.parallel.stages import BlockWeights
from hardpoint_plugin_api import BlockArgs, CheckpointTensors, MoEArgs, TensorInfo, UnknownNameError

_Place = tuple[str, int, bool]
"""The root of an address, the block's number, and whether it is among routed experts."""


def block_weights(
    names: Mapping[str, Address | None], blocks: tuple[BlockArgs, ...], tensors: CheckpointTensors, *, tied: bool
) -> BlockWeights:
    """Weigh ``blocks`` by ``tensors``, whose names without quantization are ``names``, see CausalLMArgs.

    A module's tensors are its own however they are quantized. Tensors without a place weigh nothing. A weight that is
    ``tied`` is on the first and the last stage.
    """
    places = _places(names)
    held, ends = Counter[int](), Counter[str]()
    used = dict.fromkeys(range(len(blocks)), 0.0)
    for name in tensors.names:
        place = next((places[prefix] for prefix in _prefixes(name) if prefix in places), None)
        if place is None:
            continue
        (root, number, is_expert), nbytes = place, _nbytes(tensors.info(name))
        if root == "stack":
            held[number] += nbytes
            used[number] += nbytes * _share(blocks[number]) if is_expert else nbytes
        else:
            ends[root] += nbytes
    both = (ends["embedding"] + ends["head"]) * tied
    every = range(len(blocks))
    return BlockWeights(
        tuple(held[number] for number in every),
        tuple(int(used[number]) for number in every),
        first=both or ends["embedding"],
        last=(both or ends["head"]) + ends["norm"],
    )


def _places(names: Mapping[str, Address | None]) -> dict[str, _Place]:
    """The place of everything whose name begins so, where all of it has the same."""
    found: dict[str, set[_Place]] = {}
    for name, address in names.items():
        if address is None:
            continue
        root, _, rest = first_slot(address).partition(".")
        number = int(rest.removeprefix("blocks.").partition(".")[0]) if root == "stack" else 0
        for prefix in _prefixes(name):
            found.setdefault(prefix, set()).add((root, number, ".experts." in rest))
    return {prefix: places.pop() for prefix, places in found.items() if len(places) == 1}


def _prefixes(name: str) -> Iterator[str]:
    """The name, its module's, and so on, the longest first."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _share(block: BlockArgs) -> float:
    """How many of a block's experts a token goes to."""
    mixtures = [part for part in (block.mixer, block.feed_forward) if isinstance(part, MoEArgs)]
    return max((part.router.top_k / part.router.num_experts for part in mixtures), default=1.0)


def _nbytes(info: TensorInfo) -> int:
    try:
        dtype = dtype_of(info.dtype)
    except UnknownNameError:  # of a format's own, which is stored as bytes
        dtype = torch.uint8
    return prod(info.shape) * dtype.itemsize
