"""Recorded lists beyond the contract of graph engines: what is one list, whose memory is whose, what is refused."""

from __future__ import annotations

import ctypes
import gc
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional

from hardpoint_cpu import native
from hardpoint_cpu.recorded_list import RecordedLists, _known_shape
from hardpoint_plugin_api import PlatformError
from tests.cpu.building import needs_kernels

needs_kernels()


WIDTH = 64


@pytest.fixture
def graphs() -> Iterator[RecordedLists]:
    yield RecordedLists()
    assert not native.is_recording()


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A compiled kernel, as the plugin's ops call it. x float32 [rows, n]."""
    out = torch.empty_like(x)
    number = native.number_for("rms_norm", x.dtype)
    arguments = (x.data_ptr(), weight.data_ptr(), out.data_ptr(), len(x), x.shape[1], x.stride(0), 1e-6)
    native.run(number, *arguments)
    return out


def chain(x: torch.Tensor, weight: torch.Tensor, depth: int = 20) -> torch.Tensor:
    for _ in range(depth):
        x = rms_norm(x, weight)
    return x


def wanted(x: torch.Tensor, weight: torch.Tensor, depth: int = 20) -> torch.Tensor:
    for _ in range(depth):
        x = functional.rms_norm(x, x.shape[-1:], weight, 1e-6)
    return x


def buffers(rows: int = 3, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(rows, WIDTH, generator=generator),
        "weight": 1 + 0.1 * torch.randn(WIDTH, generator=generator),
    }


def test_kernels_alone_become_one_list(graphs: RecordedLists) -> None:
    held = buffers()
    with torch.inference_mode():
        prepared = graphs.prepare("chain", chain, held)
        assert (prepared.num_lists, prepared.num_kernels, prepared.num_operators) == (1, 20, 0)
        for seed in range(3):
            held["x"].copy_(buffers(seed=seed)["x"])
            torch.testing.assert_close(prepared.run(), wanted(**held))


def test_other_operators_stand_between_lists(graphs: RecordedLists) -> None:
    def step(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = chain(x, weight, 2)
        halves = functional.silu(hidden)[:, WIDTH // 2 :].reshape(-1, WIDTH // 4)  # a copy, of a view
        scores = functional.scaled_dot_product_attention(*(hidden.view(1, 1, *hidden.shape),) * 3)
        return halves, rms_norm(scores.view(hidden.shape) @ torch.eye(WIDTH), weight)

    held = buffers()
    with torch.inference_mode():
        prepared = graphs.prepare("mixed", step, held)
        held["x"].copy_(buffers(seed=5)["x"])
        expected = step(**held)
        assert prepared.num_lists == 2
        assert all(torch.equal(got, one) for got, one in zip(prepared.run(), expected, strict=True))


def test_memory_is_used_again_within_a_step_and_between_steps(graphs: RecordedLists) -> None:
    held = buffers(rows=1024)
    result = 1024 * WIDTH * 4
    kept = [graphs.prepare("deep", lambda x, weight: chain(x, weight, 100), held)]
    once = graphs.shared_bytes
    assert once < 10 * result, "a hundred tensors of which two live at a time"
    kept += [graphs.prepare(i, chain, held) for i in range(5)]
    assert graphs.shared_bytes == once
    assert result <= graphs.bytes_per_graph < 2 * result


def test_results_of_all_graphs_lie_apart(graphs: RecordedLists) -> None:
    """Earlier recorded lists use memory between their operators that held results of later ones during recording."""
    held = buffers()
    prepared = [graphs.prepare(depth, lambda x, weight, d=depth: chain(x, weight, d), held) for depth in (9, 1, 4)]
    results = [one.run() for one in prepared]
    for _ in range(2):
        for depth, result in zip((9, 1, 4), results, strict=True):
            torch.testing.assert_close(result, wanted(**held, depth=depth))
        for one in reversed(prepared):
            one.run()


def test_results_may_be_views_of_one_tensor_and_of_inputs(graphs: RecordedLists) -> None:
    def step(x: torch.Tensor, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        out = chain(x, weight)
        return {"last": out[-1], "all": out, "input": x[1:]}

    held = buffers()
    result = graphs.prepare("views", step, held).run()
    assert result["last"].data_ptr() == result["all"][-1].data_ptr()
    assert result["input"].data_ptr() == held["x"][1:].data_ptr()
    torch.testing.assert_close(result["last"], wanted(**held)[-1])


def test_engines_do_not_share(graphs: RecordedLists) -> None:
    other, held = RecordedLists(), buffers()
    first, second = graphs.prepare("a", chain, held), other.prepare("b", lambda **kw: chain(**kw) * 2, held)
    del other, graphs
    gc.collect()
    a, b = first.run(), second.run()
    assert torch.equal(a * 2, b)


def test_preparing_computes_nothing(graphs: RecordedLists) -> None:
    target = torch.full((4, WIDTH), 7.0)

    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        target[:3].copy_(rms_norm(x, weight))
        target.index_fill_(0, torch.tensor([3]), 1.0)
        torch.add(x, 1, out=x)
        return target

    held = buffers()
    before = held["x"].clone()
    prepared = graphs.prepare("writes", step, held)
    assert torch.equal(held["x"], before)
    assert bool((target == 7).all())
    torch.testing.assert_close(prepared.run()[:3], wanted(before, held["weight"], 1))
    assert torch.equal(held["x"], before + 1)
    assert bool((target[3] == 1).all())


def test_nothing_of_an_earlier_run_is_there_while_a_step_is_recorded(graphs: RecordedLists) -> None:
    """A kernel that read it could be right by chance, until inputs change."""
    found: list[list[float]] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        found.append(list((ctypes.c_float * y.numel()).from_address(y.data_ptr())))
        return y * 2

    x = torch.arange(8.0)
    for _ in range(2):
        assert torch.equal(graphs.prepare("step", step, {"x": x}).run(), (x + 1) * 2)
    assert all(math.isnan(value) for values in found for value in values)


def test_a_constant_outlives_the_function(graphs: RecordedLists) -> None:
    held = buffers()
    weight = held["weight"].tolist()
    prepared = graphs.prepare("constant", lambda x: rms_norm(x, torch.tensor(weight)), {"x": held["x"]})
    torch.testing.assert_close(prepared.run(), wanted(**held, depth=1))


def test_an_error_inside_leaves_nothing_recording(graphs: RecordedLists) -> None:
    held = buffers()

    def broken(x: torch.Tensor, weight: torch.Tensor) -> None:
        chain(x, weight)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        graphs.prepare("broken", broken, held)
    assert not native.is_recording()
    torch.testing.assert_close(chain(**held), wanted(**held))
    torch.testing.assert_close(graphs.prepare("after", chain, held).run(), wanted(**held))


def test_no_step_within_a_step(graphs: RecordedLists) -> None:
    held = buffers()
    ready = graphs.prepare("inner", chain, held)
    with pytest.raises(PlatformError, match="'again' cannot be recorded within another"):
        graphs.prepare("outer", lambda **kw: RecordedLists().prepare("again", chain, kw), held)
    with pytest.raises(RuntimeError, match="cannot be replayed while"):
        graphs.prepare("outer", lambda **_: ready.run(), held)


@pytest.mark.parametrize("update", [{"x": torch.ones(3, WIDTH)}, {"y": 1}, {"depth": "much"}], ids=str)
def test_what_cannot_be_rebound(graphs: RecordedLists, update: dict[str, object]) -> None:
    prepared = graphs.prepare("chain", chain, {**buffers(), "depth": 3})
    with pytest.raises(PlatformError, match=r"fixed buffer|no input|must be a number"):
        prepared.run(update)


def test_numbers_may_decide_about_anything(graphs: RecordedLists) -> None:
    held = buffers()
    prepared = graphs.prepare("chain", chain, {**held, "depth": 3})
    recorded = prepared.run({"depth": 3})
    torch.testing.assert_close(prepared.run({"depth": 5}), wanted(**held, depth=5))
    assert prepared.run() is recorded
    torch.testing.assert_close(recorded, wanted(**held, depth=3))


def test_tensors_that_stay_are_refused(graphs: RecordedLists) -> None:
    held, kept = buffers(), []
    with pytest.raises(PlatformError, match=r"'keeps' .* keeps 768 bytes of tensors that it does not return"):
        graphs.prepare("keeps", lambda **kw: kept.append(chain(**kw)), held)
    torch.testing.assert_close(graphs.prepare("after", chain, held).run(), wanted(**held))


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (lambda x: x.t_(), r"aten.t_.* changes the shape"),
        (lambda x: x.resize_(100, 100), r"aten.resize_.* changes the shape"),
        (lambda x: torch.add(x, 1, out=torch.empty(0)), r"aten.add.out changes the shape"),
        (lambda x: torch.masked_select(x, x > 0), r"aten.masked_select.* asks for a tensor's values"),
        (lambda x: x[torch.zeros(3, dtype=torch.int64)[0]], r"asks for a tensor's values"),
    ],
    ids=["transpose", "resize", "out", "masked", "index"],
)
def test_what_is_refused_is_named(graphs: RecordedLists, step: Callable[..., object], why: str) -> None:
    x = buffers()["x"]
    with pytest.raises(PlatformError, match=rf"'refused'.*{why}"):
        graphs.prepare("refused", step, {"x": x})
    assert x.shape == (3, WIDTH)


def test_other_threads_go_on_computing_while_one_records(graphs: RecordedLists) -> None:
    held, results = buffers(), []

    def step(**kw: Any) -> torch.Tensor:
        thread = threading.Thread(target=lambda: results.append(chain(**kw)))
        thread.start()
        thread.join()
        return chain(**kw)

    prepared = graphs.prepare("threads", step, held)
    torch.testing.assert_close(results[0], wanted(**held))
    assert prepared.num_kernels == 20


def test_threads_record_and_replay_at_once() -> None:
    """Each its own engine: an engine's graphs share memory."""
    held, results = [buffers(seed=i) for i in range(4)], {}

    def work(i: int) -> None:
        prepared = RecordedLists().prepare(i, chain, held[i])
        for _ in range(50):
            results[i] = prepared.run().clone()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(4):
        torch.testing.assert_close(results[i], wanted(**held[i]))


_X = torch.arange(12, dtype=torch.float32).view(3, 4) + 1
_ROW, _INTS = torch.ones(4, dtype=torch.bfloat16), torch.ones(3, 1, dtype=torch.int32)
_NUMBER = torch.tensor(2.0, dtype=torch.float64)
_TABLE, _SLOTS = torch.arange(30.0).view(10, 3), torch.tensor([[1, 2], [0, 9]])
_aten = torch.ops.aten
KNOWN: list[tuple[Any, tuple[Any, ...]]] = [
    (_aten.add.Tensor, (_X, _ROW)),
    (_aten.add.Tensor, (_X, _X)),
    (_aten.add.Tensor, (_INTS, _NUMBER)),
    (_aten.mul.Tensor, (_ROW, _NUMBER)),
    (_aten.div.Tensor, (_INTS, _INTS)),
    (_aten.div.Tensor_mode, (_INTS, _INTS)),
    (_aten.add.Scalar, (_INTS, 1.5)),
    (_aten.lt.Tensor, (_X, _INTS)),
    (_aten.where.self, (_X > 3, _X, _NUMBER)),
    (_aten.exp.default, (_INTS,)),
    (_aten.bitwise_and.Tensor, (_INTS, _INTS)),
    (_aten.index.Tensor, (_TABLE, [_SLOTS])),
    (_aten.index.Tensor, (_TABLE, [_SLOTS, _SLOTS[:1] % 3])),
    (_aten.index.Tensor, (_TABLE[:, 1], [_SLOTS[0]])),
]


@pytest.mark.parametrize(("func", "args"), KNOWN, ids=lambda value: str(value) if callable(value) else "")
def test_shapes_that_are_known_are_those_of_torch(func: Any, args: tuple[Any, ...]) -> None:
    kwargs = {"rounding_mode": "floor"} if func is _aten.div.Tensor_mode else {}
    known, result = _known_shape(func, args, kwargs), func(*args, **kwargs)
    assert known is not None
    assert (known.shape, known.dtype, known.stride()) == (result.shape, result.dtype, result.stride())


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (_aten.add.Tensor, (_X.t(), _X.t())),
        (_aten.index.Tensor, (_TABLE.t(), [_SLOTS % 3])),
        (_aten.index.Tensor, (_TABLE, [None, _SLOTS % 3])),
        (_aten.sum.default, (_X,)),
    ],
)
def test_results_whose_strides_depend_on_more_are_asked_of_torch(func: Any, args: tuple[Any, ...]) -> None:
    assert _known_shape(func, args, {}) is None
