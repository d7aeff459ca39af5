"""How products with GGUF's blocks (block_weights.py) are cut: the tuning table ``blocks``.

Axes: M rows of x, N rows of the weight (out), K columns (in).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from hardpoint.kernels.tables import NO_OPTIONS, Options, Table, table, table_of
from hardpoint_plugin_api import BuildContext


@dataclass(frozen=True)
class BlockCut:
    """A tile of the product, and how many blocks of columns are on their way at a time.

    ``pieces`` programs share the columns of a tile; another kernel adds up what they found. ``numbers_first``: weights
    are scaled, and rounded to the dtype of x, before they are multiplied. Otherwise codes are multiplied, and a group's
    product is scaled in float32, which is less work for few rows of x.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    pieces: int = 1
    numbers_first: bool = False
    options: Options = NO_OPTIONS


@dataclass(frozen=True)
class BlockTuning:
    """A cut as tuning tables say it. A tile has up to ``most_pieces``, as many as leave about ``programs`` programs."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    most_pieces: int = 1
    programs: int = 256
    numbers_first: bool = False
    options: Options = NO_OPTIONS

    def cut(self, num_rows: int, n: int) -> BlockCut:
        """The cut for ``num_rows`` rows of x and a weight of ``n`` rows."""
        tiles, pieces = -(-num_rows // self.block_m) * -(-n // self.block_n), 1
        while pieces < self.most_pieces and tiles * pieces < self.programs:
            pieces *= 2
        size = self.block_m, self.block_n, self.num_warps, self.num_stages
        return BlockCut(*size, pieces, self.numbers_first, self.options)


BlockTable = Table[BlockTuning]

_FACTS: Mapping[str, type] = {"rows": int, "n": int, "itemsize": int}


def block_table(ctx: BuildContext) -> BlockTable:
    """The tuning table of the context's device. Raises ConfigError for a file that is not right."""
    return table_of(ctx, "blocks", BlockTuning, _FACTS)


@cache
def _portable_table() -> BlockTable:
    return table("blocks", BlockTuning, tuple(_FACTS.items()))


def block_cut(num_rows: int, n: int, itemsize: int, cuts: BlockTable | None = None) -> BlockCut:
    """The cut for ``num_rows`` rows of x, of elements of ``itemsize`` bytes, and a weight of ``n`` rows.

    ``cuts`` is a device's table, by default core's.
    """
    return (cuts or _portable_table()).find(rows=num_rows, n=n, itemsize=itemsize).cut(num_rows, n)
