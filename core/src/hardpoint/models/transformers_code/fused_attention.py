"""Attention modules whose code is projection, norms of heads or none, rotation or none, attention, projection.

Such a module runs as Hardpoint's own attention does: one op norms, rotates and writes to the cache. Its code is tried
with random numbers in place of the projections (see trial.py); a module that computes anything else stays as it is.

Axes: T tokens, H query heads, K KV heads, D head size, R rotated elements.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hardpoint.models.transformers_code.attention import CURRENT
from hardpoint.models.transformers_code.current import Current
from hardpoint.models.transformers_code.matching import NormMatch
from hardpoint.models.transformers_code.probe import AttentionSeen, Call, Probe
from hardpoint.models.transformers_code.rotary_tables import Angles
from hardpoint.models.transformers_code.stand_ins import LinearStandIn, NormStandIn
from hardpoint.models.transformers_code.trial import Given, NormPart, Part, agree, exchanged, numbers, wide
from hardpoint.ops.rotary_embedding import rotary_embedding

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True)
class Turn:
    """How heads are rotated: pairs of elements side by side or not, each angle given twice in a row or in halves."""

    interleaved: bool
    in_a_row: bool


@dataclass(frozen=True)
class AttentionMatch:
    """``out``: the name of the last projection. ``norms``: those of queries' and keys' norms, if heads are normed.

    ``eps``: of the norms, 0 without any. ``turn``: None where heads are not rotated.
    """

    out: str
    norms: tuple[str, str] | None
    eps: float
    turn: Turn | None

    @property
    def scalars(self) -> dict[str, Any]:
        """The keywords of ``qk_norm_rope_store``."""
        return {"eps": self.eps, "interleaved": self.turn is not None and self.turn.interleaved}


@dataclass
class _Interface:
    """Takes the place of ``Current`` and its probe in a trial: notes what attention is called with."""

    returned: torch.Tensor
    calls: list[tuple[torch.Tensor, ...]]

    @property
    def probe(self) -> _Interface:
        return self

    def attend(self, module: nn.Module, *args: Any, **keywords: Any) -> torch.Tensor:
        self.calls.append(args[:3])
        return self.returned


def match_attention(
    module: nn.Module, call: Call, seen: AttentionSeen, norms: Mapping[nn.Module, NormMatch], dtype: torch.dtype
) -> AttentionMatch | None:
    """How ``module`` fits the head of this file; None where its code computes anything else.

    ``call``: its call in the run on the meta device, and ``seen`` the call of attention within. ``norms``: the model's.
    """
    linears = [name for name, child in module.named_children() if isinstance(child, LinearStandIn)]
    last = [name for name in linears if name not in _PROJECTIONS]
    if len(linears) != len(_PROJECTIONS) + 1 or len(last) != 1 or seen.value_size != seen.head_size:
        return None
    named = sorted(name for name, child in module.named_children() if isinstance(child, NormStandIn))[::-1]
    if len(named) not in (0, 2) or (named and [name[0] for name in named] != ["q", "k"]):
        return None
    found = [norms[module.get_submodule(name)] for name in named]
    if any(norm.size != seen.head_size for norm in found) or len({norm.eps for norm in found}) > 1:
        return None
    pair = (named[0], named[1]) if named else None
    turns = [None, *(itertools.starmap(Turn, itertools.product((False, True), repeat=2)) if call.angles else ())]
    for turn in turns:
        match = AttentionMatch(last[0], pair, found[0].eps if found else 0.0, turn)
        if all(_computes(module, call, seen, match, each) for each in dict.fromkeys((torch.float32, dtype))):
            return match
    return None


@torch.no_grad()
def _computes(module: nn.Module, call: Call, seen: AttentionSeen, match: AttentionMatch, dtype: torch.dtype) -> bool:
    """Whether ``module`` computes what ``match`` says, with ``dtype``."""
    given = numbers(call, dtype, match.turn is not None and match.turn.in_a_row)
    if given is None:
        return False
    tokens = given.hidden.shape[1]
    heads = {name: seen.num_heads if name == "q_proj" else seen.num_kv_heads for name in _PROJECTIONS}
    made = {name: wide(1, tokens, count * seen.head_size, dtype=dtype) for name, count in heads.items()}
    parts: dict[str, Part] = {name: Part(x.clone(), x) for name, x in made.items()}
    out = parts[match.out] = Part(wide(*given.hidden.shape, dtype=dtype))
    for name in match.norms or ():
        parts[name] = NormPart(seen.head_size, match.eps, dtype)
    attended = wide(1, tokens, seen.num_heads, seen.head_size, dtype=dtype)
    interface, own = _Interface(attended.clone(), []), getattr(module, CURRENT)
    object.__setattr__(module, CURRENT, interface)
    try:
        with exchanged(module, parts):
            result = module.forward(*given.call.args, **given.call.kwargs)
    except Exception:  # code of hundreds of models, with parts that are not the model's
        return False
    finally:
        object.__setattr__(module, CURRENT, own)
    if not (isinstance(result, tuple) and len(result) == 2 and result[0] is out.returned and result[1] is None):
        return False
    if len(interface.calls) != 1 or any(len(part.calls) != 1 for part in parts.values()):
        return False
    projected = all(agree(parts[name].calls[0].hidden, given.hidden) for name in _PROJECTIONS)
    q, k, v = (x.view(tokens, -1, seen.head_size) for x in made.values())
    wanted = (*_turned(q, k, given, parts, match), v)
    passed = all(agree(x[0].transpose(0, 1), y) for x, y in zip(interface.calls[0], wanted, strict=True))
    return projected and passed and agree(out.calls[0].hidden, attended.flatten(2))


def _turned(
    q: torch.Tensor, k: torch.Tensor, given: Given, parts: Mapping[str, Part], match: AttentionMatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, H, D] and k [T, K, D], normed and rotated as ``match`` says."""
    for_q, for_k = (parts[name] for name in match.norms) if match.norms else (None, None)
    if isinstance(for_q, NormPart) and isinstance(for_k, NormPart):
        q, k = for_q.normed(q), for_k.normed(k)
    if match.turn is None or given.angles is None:
        return q, k
    table = torch.cat([given.angles.cos().to(q.dtype), given.angles.sin().to(q.dtype)], -1).float()
    rows = torch.arange(q.shape[0])
    turned: tuple[torch.Tensor, torch.Tensor]
    turned = rotary_embedding.reference(q, k, rows, table, interleaved=match.turn.interleaved)
    return turned


class FusedAttention:
    """Takes the place of ``forward`` in a module that was recognised. ``number``: its call of attention in a step."""

    def __init__(self, module: Any, number: int, match: AttentionMatch, current: Current) -> None:
        self._current, self._number, self._turn = current, number, match.turn
        self._own: Callable[..., Any] = module.forward
        self._projections = [getattr(module, name) for name in _PROJECTIONS]
        self._out = getattr(module, match.out)
        self._norms = [getattr(module, name) for name in match.norms or ()]

    def __call__(self, hidden_states: torch.Tensor, *, position_embeddings: Any = None, **rest: Any) -> Any:
        """hidden_states [1, T, hidden] -> the like, and None. Writes this step's keys and values to the cache."""
        current = self._current
        if current.is_traced:
            return self._own(hidden_states, position_embeddings=position_embeddings, **rest)
        angles = rows = None
        if self._turn is not None:  # before the projections: a kernel that is launched early must find its table
            angles, rows = self._table(position_embeddings, self._turn.in_a_row)
        q, k, v = (projection(hidden_states)[0] for projection in self._projections)
        layer = current.attention[self._number]
        current.calls = self._number + 1
        weights = [norm.layer.weights["weight"] for norm in self._norms] or (None, None)
        attended = layer.norm_rotate_attend(q, k, v, angles, rows, weights, current.step)
        return self._out(attended.view(1, hidden_states.shape[1], -1)), None

    def _table(self, angles: Sequence[torch.Tensor], in_a_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The table float32 [P, R] and the row of each token: of a RotaryTable, or made in this step."""
        if isinstance(angles, Angles):
            return angles.table(in_a_row)
        cos, sin = angles
        return self._current.table(cos, sin, in_a_row)


def match_calls(
    probe: Probe, norms: Mapping[nn.Module, NormMatch], dtype: torch.dtype
) -> dict[int, tuple[nn.Module, AttentionMatch]]:
    """The modules that can run as ``FusedAttention``, by the number of their call of attention in a step."""
    modules = {path: module for module, path in probe.paths.items()}
    paths = Counter(seen.path for seen in probe.attention)
    found = dict[int, tuple[nn.Module, AttentionMatch]]()
    for number, seen in enumerate(probe.attention):
        module = modules[seen.path]
        calls = probe.calls.get(module, [])
        if paths[seen.path] == len(calls) == 1:
            match = match_attention(module, calls[0], seen, norms, dtype)
            found |= {} if match is None else {number: (module, match)}
    return found
