"""How long each block of a model takes, on random weights, for the division among pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from hardpoint.bench.device_timer import DeviceTimer, Run
from hardpoint.checkpoint.random_weights import RandomWeights
from hardpoint.checkpoint.reading import Reading, first_slot
from hardpoint.config import EngineConfig
from hardpoint.engine.blueprint import Blueprint, draw
from hardpoint.engine.execution.forward import Forward
from hardpoint.engine.execution.graphs.shapes import StepShape
from hardpoint.engine.execution.graphs.step_buffers import first_lengths, trial_step
from hardpoint.engine.execution.memory.cache_memory import CacheMemory, page_bytes
from hardpoint.engine.execution.worker import step_limits
from hardpoint.engine.scheduling.paged_cache import CacheGeometry
from hardpoint.layers import CausalLMArgs
from hardpoint.layers.base import PluggableLayer
from hardpoint.layers.loading import load_made_weights
from hardpoint.parallel.stages import BlockWeights, StageDivision
from hardpoint.terminal.progress import progress_bar
from hardpoint_plugin_api import BlockArgs, ConfigError, ForwardStep

_WORKING_SET = 256 * 2**20
"""Bytes that are read between two runs, more than caches hold."""


@dataclass(frozen=True)
class Kind:
    """Blocks of the same arguments, by their numbers: bytes of the weights of one, and seconds that it takes."""

    numbers: tuple[int, ...]
    nbytes: int
    seconds: float


def block_kinds(config: EngineConfig, tokens: int, rounds: int) -> list[Kind]:
    """Measure one block of each kind in a step of ``tokens`` tokens of a prompt, on one device.

    A step has at most --max-num-batched-tokens. Raises ConfigError for tensor parallelism, for models that have no
    stages or fewer blocks than stages, and the errors of ``draw``.
    """
    if config.topology.tensor > 1:
        raise ConfigError(
            f"--tensor-parallel-size {config.topology.tensor}: blocks are measured on one device; set it to 1"
        )
    blueprint = draw(config.of_one_rank())
    if not isinstance(getattr(blueprint.model, "args", None), CausalLMArgs):
        raise ConfigError(f"{config.model}: it runs by Transformers' code, which has no pipeline stages")
    StageDivision().of(len(blueprint.model.args.blocks), config.topology.pipeline)  # before anything is measured
    ctx, platform = blueprint.ctx, blueprint.platform
    ctx.resources.allocate(ctx.torch_device)
    timer = DeviceTimer(platform, ctx.torch_device, _WORKING_SET)
    kinds = []
    with torch.inference_mode(), platform.current(), progress_bar("kinds of blocks measured", None) as measured:
        step = _step(blueprint, tokens)
        for numbers in _alike(blueprint.model.args.blocks):
            block = blueprint.model.stack.blocks[str(numbers[0])]
            _fill(blueprint, numbers[0])
            layers = [layer for layer in block.modules() if isinstance(layer, PluggableLayer)]
            nbytes = sum(x.nbytes for layer in layers for x in layer.weights.values())
            seconds = timer.seconds([_run(blueprint, block, step)], rounds)
            kinds.append(Kind(numbers, nbytes, seconds))
            for layer in layers:
                layer.release()
            measured()
    return kinds


def divided_by_time(config: EngineConfig, kinds: list[Kind], stages: int) -> tuple[int, ...]:
    """How many blocks each of ``stages`` has where time decides, and bytes where times are equal."""
    total = sum(len(kind.numbers) for kind in kinds)
    nbytes, nanoseconds = [0] * total, [0] * total
    for kind in kinds:
        for number in kind.numbers:
            nbytes[number], nanoseconds[number] = kind.nbytes, round(kind.seconds * 1e9)
    one = config.model_copy(update={"pipeline_parallel_layers": ()})
    known = draw(one, rank=0).model.division.weights
    ends = {} if known is None else {"first": known.first, "last": known.last}
    weights = BlockWeights(tuple(nbytes), tuple(nanoseconds), **ends)
    return StageDivision(weights=weights).of(total, stages)


def _alike(blocks: tuple[BlockArgs, ...]) -> list[tuple[int, ...]]:
    """The numbers of blocks with the same arguments."""
    kinds: list[tuple[BlockArgs, list[int]]] = []
    for number, block in enumerate(blocks):
        found = next((numbers for known, numbers in kinds if known == block), None)
        if found is None:
            kinds.append((block, [number]))
        else:
            found.append(number)
    return [tuple(numbers) for _, numbers in kinds]


def _fill(blueprint: Blueprint, number: int) -> None:
    """Make the weights of one block, at its place in the model."""
    ctx, model = blueprint.ctx, blueprint.model
    root, stack = nn.Module(), nn.Module()
    root.stack, stack.blocks = stack, nn.ModuleDict({str(number): model.stack.blocks[str(number)]})
    place = f"stack.blocks.{number}."
    names = {
        name: where
        for name, where in model.weight_names.items()
        if where is not None and all(address.startswith(place) for address in _addresses(where))
    }
    random = RandomWeights(ctx.torch_device, ctx.dtype, ctx.config.seed)
    load_made_weights(root, names, random.make, ctx.torch_device, title="random weights")


def _addresses(where: object) -> Iterator[str]:
    if isinstance(where, tuple):
        for reading in where:
            assert isinstance(reading, Reading)
            yield from reading.places.values()
    else:
        yield first_slot(where)  # type: ignore[arg-type]  # an Address, see WeightNames


def _step(blueprint: Blueprint, tokens: int) -> ForwardStep:
    """A step of a prompt, or of several where sequences are short, whose tokens lie in the null page."""
    ctx, users = blueprint.ctx, blueprint.ctx.cache_users
    limits = step_limits(blueprint)
    assert limits.max_tokens is not None
    groups = users.cache_groups()
    geometry = CacheGeometry(ctx.block_size, tuple(group.retention for group in groups), limits.max_tokens)
    least = (geometry.pages_for(1) + 1) * page_bytes(users, ctx.block_size)
    forward = Forward(blueprint.model, users, CacheMemory(users, geometry, least, ctx.torch_device).views)
    longest = min(ctx.max_model_len, limits.max_context or ctx.max_model_len)
    lengths = first_lengths(StepShape("eager", min(tokens, limits.max_tokens), None, None, "hidden"), longest)
    _, positions, batches = trial_step(lengths, len(groups), ctx.block_size, 0, ctx.torch_device)
    return ForwardStep(positions, positions, forward.caches, forward.plan(batches))


def _run(blueprint: Blueprint, block: nn.Module, step: ForwardStep) -> Run:
    shape = step.positions.shape[0], blueprint.facts.hidden_size
    x = torch.randn(shape, dtype=blueprint.ctx.dtype, device=blueprint.ctx.torch_device)
    residual = torch.randn_like(x)
    return lambda: block(x, residual.clone(), step)
