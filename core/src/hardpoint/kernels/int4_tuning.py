"""How products with 4-bit weights (weight_only.py) are cut: the tuning table ``int4``.

Axes: M rows of x, N rows of the weight (out), K columns (in).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from hardpoint.kernels.tables import NO_OPTIONS, Options, Table, table, table_of
from hardpoint_plugin_api import BuildContext


@dataclass(frozen=True)
class Int4Configuration:
    """A tile of the product, and how many blocks of columns are on their way at a time.

    With ``split``, each of the warps has all rows of the tile and columns of its own, and their sums are added up at
    the end, in one order. Without, they have rows each: 16 at least, or the work is done twice. ``pieces`` programs
    share the columns of a tile; what they found is added up by another kernel, in one order too.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    split: bool = False
    pieces: int = 1
    options: Options = NO_OPTIONS


@dataclass(frozen=True)
class Int4Tuning:
    """A cut as tuning tables say it. A tile has up to ``most_pieces``, as many as leave about ``programs`` programs."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    split: bool = False
    most_pieces: int = 1
    programs: int = 200
    options: Options = NO_OPTIONS

    def configuration(self, num_rows: int, n: int) -> Int4Configuration:
        """The cut for ``num_rows`` rows of x and a weight of ``n`` rows."""
        tiles, pieces = -(-num_rows // self.block_m) * -(-n // self.block_n), 1
        while pieces < self.most_pieces and tiles * pieces < self.programs:
            pieces *= 2
        size = self.block_m, self.block_n, self.num_warps, self.num_stages
        return Int4Configuration(*size, self.split, pieces, self.options)


Int4Table = Table[Int4Tuning]

_FACTS: Mapping[str, type] = {"rows": int, "n": int, "itemsize": int}


def int4_table(ctx: BuildContext) -> Int4Table:
    """The tuning table of the context's device. Raises ConfigError for a file that is not right."""
    return table_of(ctx, "int4", Int4Tuning, _FACTS)


@cache
def _portable_table() -> Int4Table:
    return table("int4", Int4Tuning, tuple(_FACTS.items()))


def int4_configuration(num_rows: int, n: int, itemsize: int, cuts: Int4Table | None = None) -> Int4Configuration:
    """The cut for ``num_rows`` rows of x, of elements of ``itemsize`` bytes, and a weight of ``n`` rows.

    ``cuts`` is a device's table, by default core's.
    """
    return (cuts or _portable_table()).find(rows=num_rows, n=n, itemsize=itemsize).configuration(num_rows, n)
