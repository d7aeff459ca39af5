"""One run of a model's code on the meta device: which attention it asks for, and which layers read the same tensor.

The run also shows whether tokens meet in attention alone. A step's tokens are those of many requests, one after the
other, so code that mixes tokens elsewhere (a convolution, a scan, scores of its own) cannot be run this way.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hardpoint.models.transformers_code.residuals import Residuals
from hardpoint_plugin_api import CheckpointError

TOKENS = 61
"""Of the run. A prime that is no size of a model, so that an axis of this length is one of tokens."""

_PATCHING = threading.Lock()
_IGNORED = frozenset(
    {"dropout", "position_ids", "use_cache", "output_attentions", "output_hidden_states", "cache_position", "training"}
    | {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "past_key_values", "position_embeddings"}
    | {"deterministic", "return_dict", "output_router_logits", "logits_to_keep", "is_causal", "sliding_window"}
)
"""Keywords of attention that say nothing of how keys are weighed, or that are read by name below."""

_SCANS = ("convolution", "cumsum", "cumprod", "logcumsumexp", "roll", "unfold", "flip")
"""Operators that mix tokens where they go along the axis of tokens."""

_FACTORIES = ("new_", "empty", "zeros", "ones", "full")
"""Operators whose results hold nothing of the tensors that they are given."""


class CannotRunError(CheckpointError):
    """The code of a model cannot be run over the tokens of many requests at once; the message says why."""


@dataclass(frozen=True)
class Mask:
    """The positions that a query reads: all up to its own, or those of a window or chunk. ``other``: none of these."""

    window: int | None = None
    chunk: int | None = None
    other: str | None = None


class _MaskStandIn(torch.Tensor):
    """Passes a ``Mask`` from the place where code asks for one to attention. Slices are still that mask."""

    mask: Mask

    @classmethod
    def of(cls, mask: Mask) -> _MaskStandIn:
        made = torch.empty(1, 1, 1, 1, device="meta").as_subclass(cls)
        made.mask = mask
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]  # torch's
        if isinstance(result, cls):
            kept = func in (torch.Tensor.__getitem__, torch.Tensor.to, torch.Tensor.contiguous)
            known = args[0].mask if kept and isinstance(args[0], cls) else Mask(other="a mask that its code changes")
            result.mask = known
        return result


@dataclass(frozen=True)
class AttentionSeen:
    """One call of attention: what AttentionSpec wants to know. ``sinks``: the parameter that holds them."""

    path: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int
    scale: float
    mask: Mask
    soft_cap: float | None = None
    sinks: nn.Parameter | None = None
    alibi: bool = False


@dataclass(frozen=True)
class Call:
    """The arguments with which a module was called, and the type of what it returned."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    returned: type

    @property
    def hidden(self) -> Any:
        """The hidden states [1, T, n]: the first argument, or the one of that name."""
        return self.args[0] if self.args else self.kwargs.get("hidden_states")

    @property
    def angles(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Cosines and sines [1, T, R] that were passed by name."""
        found = self.kwargs.get("position_embeddings")
        if isinstance(found, tuple) and len(found) == 2 and all(isinstance(x, torch.Tensor) for x in found):
            return found
        return None


@dataclass
class Probe:
    """Notes of a run. ``paths`` are those of the model's modules. ``readers``: see Residuals."""

    paths: Mapping[nn.Module, str]
    readers: Sequence[nn.Module] = ()
    attention: list[AttentionSeen] = field(default_factory=list)
    read: list[tuple[nn.Module, torch.Tensor]] = field(default_factory=list)
    """Each call of a replaced linear layer, and its input: one object where layers read the same."""
    top_k: dict[nn.Module, int] = field(default_factory=dict)
    """How many experts a token has, for each mixture."""
    reads_positions: bool = False
    calls: dict[nn.Module, list[Call]] = field(default_factory=dict)
    """The calls of modules that have modules within."""
    residuals: Residuals = field(default_factory=Residuals)

    def attend(
        self,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
        *,
        alibi: bool = False,
        **keywords: Any,
    ) -> torch.Tensor:
        """Note a call with q [1, H, T, D], k [1, K, T, D] and v [1, K, T, E]; returns [1, T, H, E]."""
        path = self.paths[module]
        if q.shape[0] != 1 or {q.shape[2], k.shape[2], v.shape[2]} != {TOKENS}:
            raise CannotRunError(
                f"{path}: attention over something else than the tokens themselves (an encoder, a memory)"
            )
        if keywords.get("is_causal", getattr(module, "is_causal", True)) is False:
            raise CannotRunError(f"{path}: attention that is not causal")
        if k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1] or q.shape[3] != k.shape[3] or v.shape[3] > k.shape[3]:
            raise CannotRunError(f"{path}: heads of the shapes {_shape(q)}, {_shape(k)} and {_shape(v)}")
        if getattr(module, "is_kv_shared_layer", False):
            raise CannotRunError(f"{path}: layers that share keys and values")
        soft_cap, sinks = keywords.pop("softcap", None), keywords.pop("s_aux", None)
        found = mask.mask if isinstance(mask, _MaskStandIn) else Mask(window=keywords.get("sliding_window"))
        if mask is not None and not isinstance(mask, _MaskStandIn):
            found = Mask(other="a mask of its own")
        if found.other:
            raise CannotRunError(f"{path}: {found.other}")
        if sinks is not None and not (isinstance(sinks, nn.Parameter) and sinks.shape == (q.shape[1],)):
            raise CannotRunError(f"{path}: attention sinks that are no parameter")
        unknown = [n for n, x in keywords.items() if n not in _IGNORED and x is not None and x is not False]
        if unknown:
            raise CannotRunError(f"{path}: attention with {', '.join(unknown)}")
        seen = AttentionSeen(
            path,
            num_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_size=q.shape[3],
            value_size=v.shape[3],
            scale=q.shape[3] ** -0.5 if scale is None else float(scale),
            mask=found,
            soft_cap=soft_cap,
            sinks=sinks,
            alibi=alibi,
        )
        self.attention.append(seen)
        return v.new_empty(1, TOKENS, q.shape[1], v.shape[3])

    def run(self, model: nn.Module) -> Any:
        """Call ``model``, all of it on the meta device, as steps do. Raises CannotRunError."""
        ids, positions = (torch.zeros(1, TOKENS, dtype=torch.int64, device="meta") for _ in range(2))
        watch = _TokenAxis(positions, self.residuals)
        try:
            with _masks(model), self._noted(model), watch, torch.inference_mode(False), torch.no_grad():
                output = model(input_ids=ids, position_ids=positions, use_cache=False)
        except CannotRunError:
            raise
        except Exception as error:  # code of hundreds of models
            first = str(error).strip().splitlines()[0] if str(error).strip() else ""
            raise CannotRunError(f"its code fails without values: {type(error).__name__}: {first:.160}") from error
        self.reads_positions |= watch.reads_positions
        self.residuals.read(output)
        return output

    @contextmanager
    def _noted(self, model: nn.Module) -> Iterator[None]:
        """Fill ``calls`` and ``residuals``."""

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            self.calls.setdefault(module, []).append(Call(args, kwargs, type(result)))

        outer = (module for module in model.modules() if next(module.children(), None) is not None)
        hooks = [module.register_forward_hook(note, with_kwargs=True) for module in outer]
        try:
            with self.residuals.watched(self.readers):
                yield
        finally:
            for hook in hooks:
                hook.remove()


class _TokenAxis(TorchDispatchMode):
    """Raises CannotRunError for operators by which tokens meet outside of attention."""

    def __init__(self, positions: torch.Tensor, residuals: Residuals) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own, which says nothing of types
        self._positions, self._residuals, self.reads_positions = positions, residuals, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self._residuals.read((args, kwargs))
        self.reads_positions |= any(x is self._positions for x in tree_leaves(args))
        if any(list(x.shape).count(TOKENS) > 1 for x in tree_leaves(result) if isinstance(x, torch.Tensor)):
            raise CannotRunError(f"its code computes scores between tokens itself ({name})")
        if any(name.startswith(scan) for scan in _SCANS) and _along_tokens(name, args, kwargs or {}):
            raise CannotRunError(f"its code mixes tokens outside of attention ({name}): it keeps a state")
        if name in ("slice", "select") and _drops_tokens(args, result):
            raise CannotRunError(f"its code treats some tokens unlike others ({name})")
        if not name.startswith(_FACTORIES) and _joins_tokens(args, result):
            raise CannotRunError(f"its code computes one value of all tokens ({name})")
        return result


def _joins_tokens(args: tuple[Any, ...], result: Any) -> bool:
    """Whether a result is one of all tokens, such as their maximum."""
    given = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor) and TOKENS in x.shape]
    made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
    return bool(given) and any(x.numel() % TOKENS for x in made)


def _drops_tokens(args: tuple[Any, ...], result: torch.Tensor) -> bool:
    """Whether a slice of activations has some of the tokens: the previous ones, say, or the last."""
    axis = args[1] if len(args) > 1 else 0
    return bool(args[0].is_floating_point() and args[0].shape[axis] == TOKENS and TOKENS not in result.shape)


def _along_tokens(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    x = args[0]
    if name.startswith("convolution") or not isinstance(x, torch.Tensor):
        return any(TOKENS <= size < 2 * TOKENS for size in x.shape[-1:]) and args[1].shape[-1] > 1
    axes = kwargs.get("dims", kwargs.get("dim", args[-1] if len(args) > 1 else ()))
    axes = axes if isinstance(axes, list | tuple) else [axes]
    return any(isinstance(axis, int) and x.shape[axis] == TOKENS for axis in axes)


@contextmanager
def _masks(model: nn.Module) -> Iterator[None]:
    """The model's code gets stand-ins of masks where it asks for some."""
    makers = {
        "create_causal_mask": lambda config: Mask(),
        "create_sliding_window_causal_mask": lambda config: Mask(window=config.sliding_window),
        "create_chunked_causal_mask": lambda config: Mask(chunk=config.attention_chunk_size),
        "create_bidirectional_mask": lambda config: Mask(other="attention that is not causal"),
        "create_bidirectional_sliding_window_mask": lambda config: Mask(other="attention that is not causal"),
    }

    def stand_in(maker: Any) -> Any:
        def make(config: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            changes = ("or_mask_function", "and_mask_function", "block_sequence_ids")
            if not getattr(config, "is_causal", True) or any(kwargs.get(name) is not None for name in changes):
                return _MaskStandIn.of(Mask(other="a mask that is not that of a decoder"))
            return _MaskStandIn.of(maker(config))

        return make

    with _PATCHING:
        kept: list[tuple[Any, str, Any]] = []
        try:
            for module in _code(model.modules()):
                for name, maker in makers.items():
                    if hasattr(module, name):
                        kept.append((module, name, getattr(module, name)))
                        setattr(module, name, stand_in(maker))
            yield
        finally:
            for module, name, function in kept:
                setattr(module, name, function)


def _code(modules: Iterable[nn.Module]) -> list[Any]:
    """The Python modules, Transformers' own, that define these classes."""
    names = {kind.__module__ for each in modules for kind in type(each).__mro__}
    return [sys.modules[name] for name in sorted(names) if name.startswith("transformers.models.")]


def _shape(x: torch.Tensor) -> str:
    return f"[{x.shape[1]}, T, {x.shape[3]}]"
