"""Finds the tiles in which the experts' matmuls are fastest on a device, by measuring.

Of some tiles unlike each other the fastest are taken. Then one setting is changed after the other, and kept where that
is faster, until none is: first for the matmul before the activation, then for the one behind it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from hardpoint.context import Context
from hardpoint.kernels.experts import TritonGroupedExperts
from hardpoint.kernels.experts_tiling import HEIGHTS, MatmulShape, Tiling, by_rule, of_height, rule_table
from hardpoint_plugin_api import ExpertsCall, ExpertsWorkload, Platform, PlatformError

_CHOICES = {
    "columns": (16, 32, 64, 128, 256),
    "depth": (32, 64, 128, 256),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4, 5),
    "described": (False, True),
}
_MOST_ON_CHIP = 224 * 1024
"""Bytes of one tile's operands in all stages: more fits no device's shared memory."""
_WORTH_IT = 0.99
"""Of the time before; less may be chance."""
_RECORDED, _RUNS = 8, 5
"""Steps of one recording, each with ids of its own, and how often it is run."""


@dataclass(frozen=True)
class Measured:
    """The fastest tiling found for a number of tokens.

    ``seconds`` are of one step in it, ``seconds_by_rule`` in the tiles of the rule, and ``seconds_of_matmuls`` of
    torch's matmuls of as many rows with one expert's matrices. ``num_active`` experts had any token, and were read.
    """

    tokens: int
    tiling: Tiling
    seconds: float
    seconds_by_rule: float
    seconds_of_matmuls: float
    num_active: int


Steps = Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""Tokens, their experts and weights, of each."""


class RandomLayer:
    """One layer's experts with random weights, on a device."""

    def __init__(self, ctx: Context, workload: ExpertsWorkload) -> None:
        self.ctx, self.kernel = ctx, TritonGroupedExperts(ctx, workload)
        assert workload.top_k is not None
        self.shape, self.top_k = self.kernel.shape, workload.top_k
        experts, hidden, width, rows = self.shape.experts, self.shape.hidden, self.shape.width, self.kernel.rows_of_w13
        self.weights = {
            "w13.weight": torch.randn(experts, rows, hidden, dtype=ctx.dtype, device=ctx.torch_device),
            "w2.weight": torch.randn(experts, hidden, width, dtype=ctx.dtype, device=ctx.torch_device),
        }

    def steps(self, tokens: int, count: int) -> Steps:
        """``count`` steps of ``tokens``, each token's experts drawn alike."""
        generator, device = torch.Generator().manual_seed(0), self.ctx.torch_device
        steps = []
        for _ in range(count):
            x = torch.randn(tokens, self.shape.hidden, generator=generator).to(device, self.ctx.dtype)
            ids = torch.rand(tokens, self.shape.experts, generator=generator).argsort(-1)[:, : self.top_k]
            weights = torch.rand(tokens, self.top_k, generator=generator)
            steps.append((x, ids.int().to(device), weights.to(device)))
        return steps

    def runner(self, tiling: Tiling, steps: Steps) -> Callable[..., torch.Tensor]:
        """A function that runs ``steps`` in the tiles, and returns the last one's result."""
        nbytes = self.kernel.workspace_bytes(len(steps[0][0]))
        scratch = torch.empty(nbytes, dtype=torch.uint8, device=self.ctx.torch_device)
        out = torch.empty_like(steps[0][0])

        def run(**_: object) -> torch.Tensor:
            for x, ids, weights in steps:
                self.kernel.run(tiling, ExpertsCall(x, ids, weights, self.weights, out, scratch))
            return out

        return run


class Tuner:
    """Finds the tiles for one layer, on a platform's active device.

    ``compile_ahead`` is told of tilings that will be measured, and of the number of tokens: it may compile them beside
    each other, into Triton's cache.
    """

    def __init__(
        self,
        platform: Platform,
        layer: RandomLayer,
        compile_ahead: Callable[[int, Sequence[Tiling]], None] = lambda tokens, tilings: None,
    ) -> None:
        self._platform, self._layer, self._compile_ahead = platform, layer, compile_ahead
        self.shape, self.top_k = layer.shape, layer.top_k

    @property
    def bytes_per_expert(self) -> int:
        """Bytes of both matrices of one expert."""
        return sum(w[0].nbytes for w in self._layer.weights.values())

    def tune(self, tokens: int, tried: Callable[[], None] = lambda: None) -> Measured:
        """Measure steps of ``tokens``; ``tried`` is called after each measurement."""
        pairs, steps = tokens * self.top_k, self._layer.steps(tokens, _RECORDED)
        rules = rule_table(self._layer.ctx)
        rule = by_rule(pairs, self.shape, rules)
        known: dict[Tiling, float] = {}

        def measured(tiling: Tiling) -> float:
            if tiling not in known:
                known[tiling] = self._seconds(tiling, steps)
                tried()
            return known[tiling]

        def announce(tilings: Sequence[Tiling]) -> None:
            self._compile_ahead(tokens, [tiling for tiling in dict.fromkeys(tilings) if tiling not in known])

        starts = [of_height(rows, pairs, self.shape, rules) for rows in heights(pairs / self.shape.experts)]
        starts += [narrower(start) for start in starts]
        starts += [described(start) for start in starts]
        announce([rule, *starts])
        best = self._search(min((rule, *starts), key=measured), measured, announce)
        active = len(steps[0][1].unique())
        return Measured(tokens, best, measured(best), measured(rule), self._seconds_of_matmuls(pairs), active)

    def _search(
        self, best: Tiling, measured: Callable[[Tiling], float], announce: Callable[[Sequence[Tiling]], None]
    ) -> Tiling:
        for name in ("w13", "w2"):
            is_better = True
            while is_better:
                is_better = False
                neighbours = list(self._neighbours(best, name))
                announce(neighbours)
                for tiling in neighbours:
                    if measured(tiling) < _WORTH_IT * measured(best):
                        best, is_better = tiling, True
        return best

    def _neighbours(self, tiling: Tiling, name: str) -> Iterator[Tiling]:
        shape: MatmulShape = getattr(tiling, name)
        operands = 2 if name == "w13" and self._layer.kernel.rows_of_w13 == 2 * self.shape.width else 1
        for setting, values in _CHOICES.items():
            at = values.index(getattr(shape, setting))
            for value in values[max(at - 1, 0) : at] + values[at + 1 : at + 2]:
                other = MatmulShape(**(asdict(shape) | {setting: value}))
                elements = (tiling.rows + operands * other.columns) * other.depth * other.num_stages
                sums = tiling.rows * operands * other.columns // (32 * other.num_warps)
                if elements * self._layer.ctx.dtype.itemsize <= _MOST_ON_CHIP and sums <= 160:
                    yield replace(tiling, w13=other) if name == "w13" else replace(tiling, w2=other)

    def _seconds(self, tiling: Tiling, steps: Steps) -> float:
        """Of one step; infinite where the device has no room for the tiles, or the compiler no way to make them."""
        try:
            return self._recorded(self._layer.runner(tiling, steps)) / len(steps)
        except (OutOfResources, PTXASError, CompilationError):
            return float("inf")
        except RuntimeError as error:
            if "PassManager" not in str(error):
                raise
            return float("inf")

    def _seconds_of_matmuls(self, rows: int) -> float:
        x, middle = (
            torch.randn(rows, width, dtype=self._layer.ctx.dtype, device=self._layer.ctx.torch_device)
            for width in (self.shape.hidden, self.shape.width)
        )
        w13, w2 = (w[0].t() for w in self._layer.weights.values())

        def run(**_: object) -> tuple[torch.Tensor, torch.Tensor]:
            return x @ w13, middle @ w2

        return self._recorded(run)

    def _recorded(self, run: Callable[..., object]) -> float:
        """The seconds that ``run`` takes, recorded by the platform's graph engine."""
        run()
        replay: Callable[[], object] = run
        # Work that cannot be recorded is called.
        with suppress(PlatformError):
            replay = self._platform.graph_engine().prepare("tune", run, {}).run
        return min(self._timed(replay) for _ in range(_RUNS))

    def _timed(self, run: Callable[[], object]) -> float:
        self._platform.synchronize()
        began = time.perf_counter()
        run()
        self._platform.synchronize()
        return time.perf_counter() - began


def narrower(tiling: Tiling) -> Tiling:
    """Tiles of half the columns, of which two run where one did: no single change leads from one to the other."""
    w13, w2 = (
        replace(shape, columns=shape.columns // 2, num_warps=4, num_stages=3) if shape.columns > 64 else shape
        for shape in (tiling.w13, tiling.w2)
    )
    return replace(tiling, w13=w13, w2=w2)


def described(tiling: Tiling) -> Tiling:
    """Tiles with weights read through descriptors."""
    return replace(tiling, w13=replace(tiling.w13, described=True), w2=replace(tiling.w2, described=True))


def heights(rows_each: float) -> list[int]:
    """Heights of tiles that are worth a try where experts have so many rows on average."""
    return [rows for rows in HEIGHTS if rows == HEIGHTS[0] or rows <= 4 * rows_each][-2:]
