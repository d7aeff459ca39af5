"""The sum over the ranks: by the layer that made a partial sum, or by the norm behind it, in one op with the norm.

A plugin written into the test's folder has an op of its own, which joins the group, and layers of its own, each derived
from core's and with a ``forward`` that expects what core's had given before there was such an op.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hardpoint import LLM, SamplingParams
from hardpoint.context import Context
from hardpoint.layers.base import PluggableLayer, sum_later
from hardpoint.layers.norm import Norm
from hardpoint.ops.add_rms_norm import add_rms_norm
from hardpoint.ops.allreduce_add_rms_norm import compose
from hardpoint.parallel.groups import Group, alone
from hardpoint.parallel.process_group import Store
from hardpoint.reference.torch_distributed import TorchDistributed
from hardpoint_plugin_api import CommunicatorWorkload, OpWorkload, PluginLoadError, SelectionError
from tests.out_of_tree.build import importable
from tests.parallel.ranks import ThreadsExecutor, on_each, ranks_in_threads
from tests.support.checkpoints import check_tokens_equal, random_prompts, write_checkpoint
from tests.support.engines import small_llm

OP = "allreduce_add_rms_norm"
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
MIXTURE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

MANIFEST = """
schema = 1
api = "0.2"
[plugin]
name = "summed"
[[contribution]]
family = "op"
of = "allreduce_add_rms_norm"
name = "summed_op"
target = "hp_summed:Summed"
form = "factory"
priority = -5
summary = "Through a process group of its own"
requires = [{ tokens = { max = 4 } }]
[[contribution]]
family = "op"
of = "allreduce_add_rms_norm"
name = "summed_plain"
target = "hp_summed:plain"
priority = -6
summary = "Knows of no group"
"""
LAYERS = ("mlp", "attention", "norm", "decoder_block", "decoder_stack")
LAYER = """
[[contribution]]
family = "layer"
of = "{of}"
name = "summed_{of}"
target = "hp_summed:{of}"
priority = -5
summary = "With a forward of its own"
requires = [{{ feature = [] }}]
"""
CODE = """
import torch
from hardpoint.layers.attention import Attention
from hardpoint.layers.causal_lm import DecoderStack
from hardpoint.layers.decoder_block import DecoderBlock
from hardpoint.layers.mlp import MLP
from hardpoint.layers.norm import Norm
from hardpoint.ops.add_rms_norm import add_rms_norm
from hardpoint.reference.torch_distributed import TorchDistributed
from hardpoint_plugin_api import GroupMember

MADE, LOG = [], []

class Summed(GroupMember):
    def __init__(self, ctx, workload, parts):
        self.inner = TorchDistributed(ctx, workload)
        ctx.resources.declare("summed", 64, scope="collective")
        self.resources, self.size = ctx.resources, workload.hidden_size
        MADE.append(self)
        LOG.append(("made", workload.ranks, workload.parallel))

    def init(self, store, rank, world, group):
        assert self.resources.get("summed").numel() == 64
        self.inner.init(store, rank, world, group)
        LOG.append(("joined", rank, world, group))

    def close(self):
        LOG.append(("left",))
        self.inner.close()

    def abort(self):
        self.inner.abort()

    def __call__(self, x, residual, weight, *, eps):
        assert x.shape[0] <= 4 and x.shape[1] == self.size
        LOG.append(("called",))
        return add_rms_norm.reference(self.inner.all_reduce(x.clone()), residual, weight, eps=eps)

def plain(x, residual, weight, *, eps):
    raise AssertionError

class mlp(MLP):
    def forward(self, x, step):
        return self._group.all_reduce(self.down(self._middle(self.gate_up(x, step)), step))

class attention(Attention):
    def forward(self, x, step):
        return super().forward(x, step)

class norm(Norm):
    def forward(self, x, residual=None):
        total = x if residual is None else x + residual
        return add_rms_norm.reference(total, torch.zeros_like(x), self.weights["weight"], eps=self.args.eps)

class decoder_block(DecoderBlock):
    def forward(self, x, residual, step):
        x, residual = self.mixer_norm(x, residual)
        residual = residual + self.mixer(x, step)
        x, residual = self.feed_forward_norm(torch.zeros_like(x), residual)
        return self.feed_forward(x, step), residual

class decoder_stack(DecoderStack):
    def forward(self, x, step, residual=None):
        for block in self.blocks.values():
            x, residual = block(x, residual, step)
            x, residual = x + residual, torch.zeros_like(x)
        return x, residual
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[Path]:
    site = tmp_path / "site"
    package, info = site / "hp_summed", site / "summed-1.0.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").write_text(CODE)
    (package / "hardpoint.toml").write_text(MANIFEST + "".join(LAYER.format(of=of) for of in LAYERS))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: summed\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hardpoint.plugins]\nsummed = hp_summed\n")
    files = ["hp_summed/__init__.py", "hp_summed/hardpoint.toml", "summed-1.0.dist-info/METADATA"]
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in [*files, "summed-1.0.dist-info/entry_points.txt"]))
    with importable(site):
        yield tmp_path


def chosen(llm: LLM) -> list[str | None]:
    return [row.chosen for row in llm.table.rows if row.family == "op" and row.of == OP]


def check(llm: LLM, model: Any, longest: int = 40) -> None:
    prompts = random_prompts(3, longest, seed=1)
    for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
        check_tokens_equal(model, prompt, output.outputs[0].token_ids)


BLOCKS = "stack.blocks"
EVERY_NORM = [f"{BLOCKS}.0.feed_forward_norm", f"{BLOCKS}.1.mixer_norm", f"{BLOCKS}.1.feed_forward_norm", "norm"]


def summing_sites(blueprint: Any) -> list[str]:
    """Norms whose first argument is a partial sum."""
    found = []
    for name, module in blueprint.model.named_modules():
        if isinstance(module, Norm) and getattr(module._add_rms_norm, "__name__", "") == OP:
            found.append(name)
    return found


def test_every_norm_behind_a_divided_layer_sums(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "qwen3", num_hidden_layers=2)
    with small_llm(tmp_path) as llm:
        assert chosen(llm) == [], "one rank has nothing to sum"
    with ranks_in_threads(tmp_path, 2) as llm:
        assert chosen(llm) == ["composed"]
        assert isinstance(llm.core.executor, ThreadsExecutor)
        for blueprint in llm.core.executor.blueprints:
            assert summing_sites(blueprint) == EVERY_NORM
        check(llm, model)


@pytest.mark.parametrize(
    ("settings", "sites"),
    [
        ({}, EVERY_NORM),
        ({"enable_expert_parallel": True}, EVERY_NORM),
        ({"enable_expert_parallel": True, "all2all_backend": "naive"}, EVERY_NORM[::2]),
    ],
    ids=["slices", "replicated", "shares"],
)
@pytest.mark.parametrize(
    ("family", "changes"),
    [pytest.param("qwen3_moe", {}, marks=pytest.mark.nightly), ("qwen2_moe", {"shared_expert_intermediate_size": 32})],
)
def test_mixtures(
    settings: dict[str, Any], sites: list[str], family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """One whose ranks gather what experts made sums for itself."""
    model = write_checkpoint(tmp_path, family, num_hidden_layers=2, **MIXTURE, **changes)
    with ranks_in_threads(tmp_path, 2, **settings) as llm:
        assert isinstance(llm.core.executor, ThreadsExecutor)
        for blueprint in llm.core.executor.blueprints:
            assert summing_sites(blueprint) == sites
        check(llm, model)


def test_the_composition_is_two_calls_with_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(3, 7, 64, generator=generator).to(torch.bfloat16)
    weight = torch.randn(64, generator=generator).to(torch.bfloat16)

    def run(rank: int, store: Store) -> None:
        communicator = TorchDistributed(
            SimpleNamespace(parallel=alone()),
            CommunicatorWorkload(dtype="bfloat16", parallel="tp", ranks=2),
        )
        communicator.init(store, rank, 2, "tp")
        parts = {"all_reduce": communicator.all_reduce, "add_rms_norm": add_rms_norm.reference}
        composed = compose(None, OpWorkload(), parts)  # type: ignore[arg-type]  # with both parts it needs no context
        total = communicator.all_reduce(drawn[rank].clone())
        wanted = add_rms_norm.reference(total, drawn[2], weight, eps=1e-6)
        assert all(map(torch.equal, composed(drawn[rank].clone(), drawn[2], weight, eps=1e-6), wanted))
        communicator.close()

    on_each(2, run)


def test_a_plugins_kernel_joins_once_and_serves_its_range(plugin: Path) -> None:
    model = write_checkpoint(plugin, "qwen3", num_hidden_layers=3)
    with ranks_in_threads(plugin, 2, use={f"op.{OP}": "summed_op"}) as llm:
        (plan,) = [plan for plan in llm.core.blueprint.ctx.selector.plans if plan.workload.of == OP]
        ranges = [(entry.range.max, entry.offer.contribution.name) for entry in plan.entries]
        assert ranges == [(4, "summed_op"), (None, "composed")]
        import hp_summed  # type: ignore[import-not-found]  # written above

        hp_summed.LOG[:] = [entry for entry in hp_summed.LOG if entry[0] != "called"]
        # the parent's own blueprint and two ranks have made one each, however many sites there are
        assert [entry for entry in hp_summed.LOG if entry[0] == "made"] == [("made", 2, "tp")] * 3
        assert sorted(e for e in hp_summed.LOG if e[0] == "joined") == [("joined", r, 2, "tp") for r in range(2)]
        check(llm, model)
        assert ("called",) in hp_summed.LOG
    assert hp_summed.LOG.count(("left",)) == 2


def test_the_shadow_check_says_that_it_leaves_sums_out(plugin: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_checkpoint(plugin, "qwen3", num_hidden_layers=2)
    settings = {"shadow_check": 1.0, "enforce_eager": True, "use": {f"op.{OP}": "summed_op"}}
    with ranks_in_threads(plugin, 2, **settings):
        pass
    lines = {record.getMessage() for record in caplog.records if "are left out" in record.getMessage()}
    assert lines == {
        f"shadow check: calls of op {OP}: {kernel} are left out: it sums 'x' over ranks, and the reference would need "
        "what the others hold"
        for kernel in ("summed_op of plugin summed", "composed of plugin core")
    }


def test_a_function_that_knows_no_group_is_refused(plugin: Path) -> None:
    write_checkpoint(plugin, "qwen3")
    with (
        pytest.raises(PluginLoadError, match=r"declare form = 'factory' and take it from ctx\.parallel\.tp"),
        ranks_in_threads(plugin, 2, use={f"op.{OP}": "summed_plain"}),
    ):
        pass


@pytest.mark.parametrize("of", LAYERS)
def test_layers_that_know_nothing_of_it(of: str, plugin: Path) -> None:
    """They get and give sums, and the others go on as before."""
    model = write_checkpoint(plugin, "qwen3", num_hidden_layers=2)
    with ranks_in_threads(plugin, 2, use={f"layer.{of}": f"summed_{of}"}) as llm:
        assert {row.chosen for row in llm.table.rows if row.family == "layer" and row.of == of} == {f"summed_{of}"}
        assert isinstance(llm.core.executor, ThreadsExecutor)
        sites = summing_sites(llm.core.executor.blueprints[0])
        assert len(sites) == {"mlp": 2, "attention": 2, "norm": 0, "decoder_block": 0, "decoder_stack": 2}[of]
        check(llm, model)


class Neither(PluggableLayer):
    """Takes no part."""

    def __init__(self, ctx: Context, args: None) -> None:
        super().__init__(ctx)


class Writer(Neither):
    """Leaves a partial sum."""

    def return_partial_sums(self) -> bool:
        return True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Reader(Neither):
    """Takes one, and says so by ``taken``."""

    taken = False

    @property
    def takes_partial_sums(self) -> bool:
        return True

    def take_partial_sums(self, ctx: Context) -> None:
        self.taken = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class OtherWriter(Writer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class OtherReader(Reader):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class SameWriter(Writer):
    """Has the forward that it says it of."""


@pytest.mark.parametrize(
    ("writer", "reader", "ranks", "agreed"),
    [
        (Writer, Reader, 2, True),
        (SameWriter, Reader, 2, True),
        (Writer, Reader, 1, False),
        (OtherWriter, Reader, 2, False),
        (Writer, OtherReader, 2, False),
        (Neither, Reader, 2, False),
        (Writer, Neither, 2, False),
    ],
)
def test_both_must_say_so_of_their_own_forward(
    writer: type[Neither], reader: type[Neither], ranks: int, agreed: bool
) -> None:
    parallel = replace(alone(), tp=Group("tp", tuple(range(ranks)), 0))
    ctx: Any = SimpleNamespace(parallel=parallel, path="")
    made = reader(ctx, None)
    sum_later(ctx, writer(ctx, None), made)
    assert getattr(made, "taken", False) is agreed


def test_a_plugins_stack_that_cannot_be_cut(plugin: Path) -> None:
    """It claims no feature, and pipeline stages are one: an automatic choice passes over it."""
    write_checkpoint(plugin, "qwen3")
    settings: dict[str, Any] = {"pipeline_parallel_size": 2, "use": {"layer.decoder_stack": "summed_decoder_stack"}}
    with pytest.raises(SelectionError, match="pipeline_stages"):
        small_llm(plugin, **settings)
