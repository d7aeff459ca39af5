"""All that stands between the query-key-value projection and attention: head norms, rotation, the write to the cache.

Axes: T tokens, H query heads, K KV heads, D head size, R rotated elements, P tabulated positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from hardpoint.ops.base import Case, custom_op
from hardpoint.ops.draw import Draw
from hardpoint.ops.error_model import ErrorModel
from hardpoint.ops.rms_norm import rms_norm
from hardpoint.ops.rotary_embedding import random_table, rotary_embedding
from hardpoint.ops.store_kv import random_cache, random_slots, store_kv
from hardpoint_plugin_api import OpWorkload, PluginLoadError, StoreCall

if TYPE_CHECKING:
    from hardpoint.context import Context

Cache = dict[str, torch.Tensor]


def _cases(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(generator, dtype, device)

    def case(
        name: str,
        tokens: int,
        size: int = 64,
        rotary: int = 64,
        normed: bool = True,
        padding: int = 0,
        interleaved: bool = False,
        eps: float = 1e-6,
    ) -> Case:
        q, k, v = draw.normal(tokens, 8, size).tensor_split([4, 6], dim=1)
        table = random_table(draw, 50, rotary) if rotary else None
        weights = (draw.normal(size), draw.normal(size)) if normed else (None, None)
        cache, slots = random_cache(draw, 5, 16, 2, size), random_slots(draw, tokens, 5, 16, padding)
        args = (q, k, v, table, draw.integers(0, 50, tokens), cache, slots, *weights)
        return Case(name, args, {"eps": eps, "interleaved": interleaved}, {"head_size": size})

    yield case("random", 9)
    yield case("decode", 1, size=128, rotary=128, eps=1e-5)
    yield case("partial", 5, size=80, rotary=32)
    yield case("interleaved", 5, interleaved=True)
    yield case("no_norm", 5, normed=False, eps=0.0)
    yield case("no_rope", 5, rotary=0)
    yield case("store_only", 5, rotary=0, normed=False, eps=0.0)
    yield case("padded", 8, padding=5)
    yield case("empty", 0)


def _allocate(q: torch.Tensor, k: torch.Tensor, *rest: Any, **scalars: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


@custom_op(
    cases=_cases,
    errors=ErrorModel(scale="row", ignore_null_page=("cache",)),
    allocate=_allocate,
    mutates=["cache"],
    aliases=[(0, "q"), (1, "k")],
    static=["eps", "interleaved"],
)
def qk_norm_rope_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor | None,
    positions: torch.Tensor,
    cache: Cache,
    slot_mapping: torch.Tensor,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    *,
    eps: float,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm each head of q [T, H, D] and k [T, K, D], rotate them, store k and v [T, K, D]; return q and k.

    The norm of q (of k) is left out where ``q_weight`` (``k_weight``), [D], is None; the rotation where ``cos_sin``,
    float32 [P, R], is. ``positions`` int64 [T], ``slot_mapping`` int32 [T]. Mutates ``cache``, whose views ``k`` and
    ``v`` are [pages, block, K, D] in the layout "plain", the one that the reference writes. ``q`` and ``k`` may be
    written to if the outputs are they. Positions, slots and table are complete before the kernel that
    produces q, k and v begins: one that is launched early reads them while that kernel still runs.
    """
    whole = _chain(rms_norm.reference, rotary_embedding.reference, _plain_store(store_kv.reference))
    return whole(q, k, v, cos_sin, positions, cache, slot_mapping, q_weight, k_weight, eps=eps, interleaved=interleaved)


def compose(
    ctx: Context, workload: OpWorkload, parts: Mapping[str, Callable[..., Any]]
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The op out of norm and rotation as selected, and the attention backend's own ``store``, part of that name.

    So it fits any layout. Without a part ``store`` it is store_kv as selected, which fits "plain" alone.
    Raises PluginLoadError where that is not enough.
    """
    store = parts.get("store")
    if store is None:
        if workload.layout not in (None, "plain"):
            raise PluginLoadError(
                f"qk_norm_rope_store cannot be composed for the cache layout {workload.layout!r} without the part "
                "'store'; pass the attention backend's own: bind(ctx, parts={'store': backend.store})"
            )
        store = _plain_store(store_kv.bind(ctx, layout="plain"))
    turns, norms = rotary_embedding.told(workload), rms_norm.told(workload)
    return _chain(
        parts.get("rms_norm") or rms_norm.bind(ctx, scalars=norms),
        parts.get("rotary_embedding") or rotary_embedding.bind(ctx, head_size=workload.head_size, scalars=turns),
        store,
    )


def _plain_store(store: Callable[..., None]) -> Callable[[StoreCall], None]:
    """``store_kv`` with the signature of an attention backend's ``store``."""
    return lambda call: store(call.k, call.v, call.cache["k"], call.cache["v"], call.slot_mapping)


def _chain(
    norm: Callable[..., torch.Tensor],
    rotate: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    store: Callable[[StoreCall], None],
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def qk_norm_rope_store(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos_sin: torch.Tensor | None,
        positions: torch.Tensor,
        cache: Cache,
        slot_mapping: torch.Tensor,
        q_weight: torch.Tensor | None = None,
        k_weight: torch.Tensor | None = None,
        *,
        eps: float,
        interleaved: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if q_weight is not None:
            q = norm(q, q_weight, eps=eps)
        if k_weight is not None:
            k = norm(k, k_weight, eps=eps)
        if cos_sin is not None:
            q, k = rotate(q, k, positions, cos_sin, interleaved=interleaved)
        store(StoreCall(k, v, cache, slot_mapping))
        return q, k

    return qk_norm_rope_store
