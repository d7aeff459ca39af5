"""The shadow check: kernels that are wrong in service now and then, and what it costs and says."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint import SamplingParams
from hardpoint.metrics import EngineMetrics
from hardpoint.ops import get
from hardpoint.ops.add_rms_norm import add_rms_norm
from hardpoint.ops.qk_norm_rope_store import qk_norm_rope_store
from hardpoint.ops.rms_norm import rms_norm
from hardpoint.ops.shadow_check import ShadowCheck
from hardpoint.ops.store_kv import store_kv
from hardpoint_plugin_api import ConfigError, Contribution
from tests.ops.manifest_context import context
from tests.out_of_tree.build import Dist, importable, install
from tests.support.checkpoints import check_tokens_equal, random_prompts, write_checkpoint
from tests.support.engines import small_llm

Tensor = torch.Tensor


class Trial:
    """``kernel`` bound in place of ``of``, under a shadow check."""

    def __init__(self, of: str, kernel: Callable[..., Any], rate: float = 1.0, seed: int = 0, **options: Any) -> None:
        self.of, self.metrics = of, EngineMetrics()
        contribution = Contribution("op", "planted", "acme:kernel", of=of, priority=100)
        ctx = context(contribution, targets={"acme:kernel": kernel})
        ctx.shadow = ShadowCheck(rate, seed, self.metrics, **options)
        self.bound = get(of).bind(ctx, layout="plain" if "store" in of else None)

    def count(self, what: str) -> float:
        """Calls of the kernel that were checked, faulty or skipped."""
        labels = {"op": self.of, "implementation": "planted"}
        try:
            return self.metrics.snapshot().value(f"hardpoint_shadow_{what}_calls_total", **labels)
        except KeyError:
            return 0


def wrong_every(period: int, right: Callable[..., Any], damage: Callable[..., Any]) -> Callable[..., Any]:
    """``right``, followed in each ``period``-th call by ``damage`` of the same arguments and the result."""
    calls = iter(range(10**6))

    def kernel(*args: Any, **kwargs: Any) -> Any:
        result = right(*args, **kwargs)
        if next(calls) % period == period - 1:
            damage(result, *args)
        return result

    return kernel


def test_without_a_rate_the_bound_function_is_the_kernel_itself() -> None:
    def kernel(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        return rms_norm.reference(x, weight, eps=eps)

    ctx = context(Contribution("op", "mine", "acme:kernel", of="rms_norm", priority=9), targets={"acme:kernel": kernel})
    assert rms_norm.bind(ctx) is kernel
    ctx.shadow = ShadowCheck(1.0, 0, EngineMetrics())
    assert rms_norm.bind(ctx) is not kernel
    plain = context()
    plain.shadow = ctx.shadow
    assert rms_norm.bind(plain) is rms_norm.reference, "the reference need not be compared with itself"


def test_a_kernel_that_is_wrong_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    def damage(result: Tensor, *args: Tensor) -> None:
        result[2, 5] += 0.01

    trial = Trial("rms_norm", wrong_every(7, rms_norm.reference, damage))
    torch.manual_seed(0)
    x, weight = torch.randn(4, 16), torch.rand(16)
    truth = rms_norm.reference(x, weight, eps=1e-6)
    results = [trial.bound(x, weight, eps=1e-6) for _ in range(30)]
    assert [bool((y != truth).any()) for y in results].count(True) == 4, "the kernel's own results are passed on"
    assert (trial.count("checked"), trial.count("faulty"), trial.count("skipped")) == (30, 4, 0)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    for part in (
        "op rms_norm: planted of plugin core is beyond the op's error model",
        f"at [2, 5] expected {float(truth[2, 5]):.5}",
        "x float32[4, 16]",
    ):
        assert part in record.getMessage()


def test_calls_are_chosen_by_the_seed() -> None:
    def checked_calls(seed: int) -> list[int]:
        calls = []
        trial = Trial("rms_norm", lambda x, weight, *, eps: rms_norm.reference(x, weight, eps=eps), 0.3, seed)
        for number in range(200):
            before = trial.count("checked")
            trial.bound(torch.ones(1, 4), torch.ones(4), eps=0.0)
            calls += [number] * (trial.count("checked") > before)
        return calls

    chosen = checked_calls(1)
    assert 30 < len(chosen) < 90
    assert checked_calls(1) == chosen != checked_calls(2)


def cache_and_slots(pages: int = 50, tokens: int = 5) -> tuple[dict[str, Tensor], Tensor]:
    torch.manual_seed(0)
    slots = torch.randperm(pages * 4 - 4)[:tokens] + 4
    slots[-1] = 0  # a padding row
    return {name: torch.randn(pages, 4, 2, 8) for name in ("k", "v")}, slots.to(torch.int32)


@pytest.mark.parametrize("fault", ["none", "wrong slot", "value not stored", "q"])
def test_an_op_that_writes_a_cache(fault: str) -> None:
    """The reference runs on copies: what the kernel stored stays, and is compared page by page."""
    cache, slots = cache_and_slots()
    untouched = {name: pages.clone() for name, pages in cache.items()}

    def damage(result: Any, q: Tensor, k: Tensor, v: Tensor, cs: None, pos: Tensor, *rest: Any) -> None:
        page, offset = int(slots[1]) // 4, int(slots[1]) % 4
        if fault == "wrong slot":
            cache["k"][page, offset] = untouched["k"][page, offset]
            cache["k"][page, (offset + 1) % 4] = k[1]
        elif fault == "value not stored":
            cache["v"][page, offset] = untouched["v"][page, offset]
        elif fault == "q":
            result[0][3] *= 1.001

    trial = Trial("qk_norm_rope_store", wrong_every(2, qk_norm_rope_store.reference, damage))
    for _ in range(4):
        q, k, v = torch.randn(5, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
        for name in cache:
            cache[name].copy_(untouched[name])
        weights = torch.rand(2, 8)
        trial.bound(q, k, v, None, torch.arange(5), cache, slots, *weights, eps=1e-6, interleaved=False)
    assert trial.count("checked") == 4
    assert trial.count("faulty") == (0 if fault == "none" else 2)
    page, offset = int(slots[0]) // 4, int(slots[0]) % 4
    assert torch.equal(cache["v"][page, offset], v[0])


def test_ops_without_outputs_and_outputs_that_are_inputs() -> None:
    cache, slots = cache_and_slots()
    store = Trial("store_kv", lambda *args: store_kv.reference(*args))
    store.bound(torch.randn(5, 2, 8), torch.randn(5, 2, 8), *cache.values(), slots)
    assert (store.count("checked"), store.count("faulty")) == (1, 0)

    def in_place(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
        residual += x
        return rms_norm.reference(residual, weight, eps=eps), residual

    add = Trial("add_rms_norm", in_place)
    x, residual, weight = torch.randn(4, 16), torch.randn(4, 16), torch.rand(16)
    total = x + residual
    _, out = add.bound(x, residual, weight, eps=1e-6)
    assert out is residual
    assert torch.equal(residual, total), "the reference has added nothing to it"
    assert (add.count("checked"), add.count("faulty")) == (1, 0)


def test_an_input_that_is_damaged(caplog: pytest.LogCaptureFixture) -> None:
    def damage(result: Any, x: Tensor, residual: Tensor, weight: Tensor) -> None:
        weight[3] = 7.0

    trial = Trial("add_rms_norm", wrong_every(3, add_rms_norm.reference, damage))
    for _ in range(3):
        trial.bound(torch.randn(4, 16), torch.randn(4, 16), torch.ones(16), eps=1e-6)
    assert trial.count("faulty") == 1
    assert "weight: at [3] expected 1, got 7; not declared" in caplog.text


def test_what_cannot_be_compared_is_counted_and_said(caplog: pytest.LogCaptureFixture) -> None:
    small = Trial("rms_norm", lambda x, weight, *, eps: rms_norm.reference(x, weight, eps=eps), most_bytes=100)
    for width in (4, 1000, 1000):
        small.bound(torch.ones(1, width), torch.ones(width), eps=0.0)
    assert (small.count("checked"), small.count("skipped")) == (1, 2)
    assert len(caplog.records) == 1
    assert "planted of plugin core are left out: inputs of 8,000 bytes are more than the 100" in caplog.text
    cache, slots = cache_and_slots(pages=10_000)
    pages = Trial("store_kv", lambda *args: store_kv.reference(*args), most_bytes=10_000)
    pages.bound(torch.randn(5, 2, 8), torch.randn(5, 2, 8), *cache.values(), slots)
    assert pages.count("checked") == 1, "of a cache only the pages in play count"


def test_a_layout_that_the_reference_does_not_know(caplog: pytest.LogCaptureFixture) -> None:
    kernel = lambda *args: None  # noqa: E731  # a function object to compare with
    ctx = context(Contribution("op", "mine", "acme:kernel", of="store_kv", priority=9), targets={"acme:kernel": kernel})
    ctx.shadow = ShadowCheck(1.0, 0, EngineMetrics())
    assert store_kv.bind(ctx, layout="tiled") is kernel
    assert "the reference knows the cache layout 'plain' alone, and this is 'tiled'" in caplog.text


def test_the_kernels_own_failure_stays_what_it_is() -> None:
    def failing(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        raise RuntimeError("device lost")

    trial = Trial("rms_norm", failing)
    with pytest.raises(RuntimeError, match="device lost"):
        trial.bound(torch.ones(1, 4), torch.ones(4), eps=0.0)
    assert trial.count("checked") == 0


FLAKY = Dist(
    "flaky-hardpoint",
    {
        "hp_flaky/__init__.py": "",
        "hp_flaky/plugin.py": "",
        "hp_flaky/norm.py": "from hardpoint.ops.rms_norm import rms_norm\n"
        "calls = 0\n"
        "def norm(x, weight, *, eps):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    y = rms_norm.reference(x, weight, eps=eps)\n"
        "    if calls % 10 == 0: y[0, 0] += 1e-3\n"
        "    return y\n",
        "hp_flaky/hardpoint.toml": 'schema = 1\napi = "0.2"\n[plugin]\nname = "flaky"\n[[contribution]]\n'
        'family = "op"\nof = "rms_norm"\nname = "flaky"\ntarget = "hp_flaky.norm:norm"\npriority = 1\n',
    },
    {"flaky": "hp_flaky.plugin"},
)


@pytest.fixture
def flaky(tmp_path: Path) -> Iterator[None]:
    """A plugin with a kernel that is off in every tenth call, really installed."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    install([FLAKY], tmp_path / "site", wheels)
    with importable(tmp_path / "site"):
        yield


@pytest.mark.usefixtures("flaky")
def test_in_an_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write_checkpoint(tmp_path / "model", "qwen3")
    prompts = random_prompts(3, 40, seed=2)
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    plain = {"op.rms_norm": "reference", "op.qk_norm_rope_store": "composed"}
    with small_llm(tmp_path / "model", shadow_check=1.0, enforce_eager=True, use=plain) as llm:
        for prompt, output in zip(prompts, llm.generate(prompts, greedy, use_tqdm=False), strict=True):
            check_tokens_equal(model, prompt, output.outputs[0].token_ids)
        counts = llm.metrics.to_prometheus()
    assert 'shadow_checked_calls_total{implementation="composed",op="qk_norm_rope_store"}' in counts
    assert "shadow_faulty_calls_total{" not in counts
    assert "shadow_skipped_calls_total{" not in counts
    flaky = {"op.rms_norm": "flaky", "op.add_rms_norm": "composed", "op.qk_norm_rope_store": "composed"}
    with small_llm(tmp_path / "model", shadow_check=0.5, enforce_eager=True, use=flaky) as llm:
        llm.generate(prompts, greedy, use_tqdm=False)
        labels = {"op": "rms_norm", "implementation": "flaky"}
        checked = llm.metrics.value("hardpoint_shadow_checked_calls_total", **labels)
        faulty = llm.metrics.value("hardpoint_shadow_faulty_calls_total", **labels)
    assert 0 < faulty < checked / 4
    assert "op rms_norm: flaky of plugin flaky is beyond the op's error model" in caplog.text


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (
            {"shadow_check": 0.5},
            "shadow_check = 0.5: ops in a captured graph cannot be compared one by one; add --enforce-",
        ),
        ({"shadow_check": 1.5, "enforce_eager": True}, "shadow_check = 1.5 is invalid: must be 1 or less"),
        ({"shadow_check": "some", "enforce_eager": True}, "shadow_check = 'some' is invalid: must be a number"),
        ({"shadow_check": True, "enforce_eager": True}, "must be a number from 0 to 1"),
    ],
)
def test_settings(tmp_path: Path, settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        small_llm(tmp_path, **settings)
