"""Models whose code computes attention itself, past Transformers' attention interface: theirs is replaced here.

One entry for each class, by name. A model that is in neither this table nor the interface is refused by the run on the
meta device, which sees its scores.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from hardpoint.models.transformers_code.attention import attend


def replace_own_attention(module: nn.Module) -> None:
    """Have ``module`` attend by the interface, where it is of a known class. Its buffers hold values still."""
    replace = _KNOWN.get(type(module).__name__)
    if replace is not None and type(module).__module__.startswith("transformers.models."):
        replace(module)


def _heads(module: Any, scale: float, window: int | None = None) -> None:
    """Replace ``_attn(query, key, value, mask)`` over heads [1, H, T, D]."""

    def _attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *masks: Any) -> tuple[torch.Tensor, None]:
        y = attend(module, q.to(v.dtype), k.to(v.dtype), v, None, scale, sliding_window=window)[0]
        return y.transpose(1, 2), None

    module._attn = _attn


def _scaled(module: Any) -> None:
    _heads(module, (getattr(module, "head_dim", None) or module.head_size) ** -0.5)


def _gpt_neo(module: Any) -> None:
    """Scores are not scaled. The last row of the buffer ``bias`` shows the window of local layers."""
    reach, most = int(module.bias[0, 0, -1].sum()), module.bias.shape[-1]
    _heads(module, 1.0, reach if reach < most else None)


def _bloom(module: Any) -> None:
    def forward(hidden_states: torch.Tensor, residual: torch.Tensor, *rest: Any, **kwargs: Any) -> tuple[Any, None]:
        q, k, v = module._reshape(module.query_key_value(hidden_states))
        y = attend(module, q, k, v, None, module.inv_norm_factor, alibi=True)[0]
        return module.dense(y.flatten(2)) + residual, None

    module.forward = forward


def _falcon(module: Any) -> None:
    """The kind without ALiBi."""
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    if getattr(module.config, "alibi", False):
        return

    def forward(hidden_states: torch.Tensor, *rest: Any, position_embeddings: Any, **kwargs: Any) -> tuple[Any, None]:
        heads = module._split_heads(module.query_key_value(hidden_states))
        q, k, v = (x.transpose(1, 2) for x in heads)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        y = attend(module, q, k, v, None, module.inv_norm_factor)[0]
        return module.dense(y.flatten(2)), None

    module.forward = forward


def _no_alibi_tensor(module: Any) -> None:
    """Attention knows the slopes, so the tensor of biases is not made."""
    module.build_alibi_tensor = partial(_nothing)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


_KNOWN: dict[str, Callable[[Any], None]] = {
    "GPTJAttention": _scaled,
    "CodeGenAttention": _scaled,
    "GPTNeoXJapaneseAttention": _scaled,
    "GPTNeoSelfAttention": _gpt_neo,
    "BloomAttention": _bloom,
    "BloomModel": _no_alibi_tensor,
    "FalconAttention": _falcon,
}
