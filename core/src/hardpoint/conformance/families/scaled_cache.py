"""Caches of elements of 8 bits and 4: what a trial draws for them, and what they may hold.

Keys and values do not fit such elements as they are: they are divided by a scale first, one for each token and head
where the layout keeps them, or one that the checkpoint gives for all. 4-bit floats have a scale for each group of
elements, and one for all may multiply it. How scales are rounded, and in which order one divides, is the layout's own;
so what it may hold is judged by the error of the plainest way, and what attention makes of it by what is held, in the
layout's own words.
"""

from __future__ import annotations

import torch

from hardpoint.conformance.site import Subject
from hardpoint.dtypes import dtype_of
from hardpoint.ops.error_model import ErrorModel
from hardpoint_plugin_api import GROUP_SIZE, NVFP4, AttentionBackend, Feature, Plane

ERRORS = ErrorModel(scale="row")
NEAR, WIDE = 3.0, 12.0
"""Tokens' magnitudes lie between 2**-3 and 2**3: then a neighbour's scale is good enough for nobody's values. Between
2**-12 and 2**12 no one scale is good enough for all."""
_GROUPS_REACH = 4.0
"""Magnitudes of groups lie between 2**-4 and 2**4: their 8-bit scales are as precise there as they can be."""
_STATIC = (0.06, 0.11)
"""Of keys and of values: elements up to 127 and more then hold what is drawn."""


def is_scaled(kv_dtype: str) -> bool:
    """Whether a cache of such elements has scales."""
    return kv_dtype == NVFP4 or dtype_of(kv_dtype).itemsize == 1


def element_bytes(plane: Plane) -> int:
    """The bytes that an address of a plane counts by; of 4-bit elements two share one."""
    return 1 if plane.scaling == "group" else dtype_of(plane.dtype).itemsize


def cache_dtypes(subject: Subject) -> tuple[str, ...]:
    """The cache dtypes to try: of those that are claimed, the device's, and 8-bit elements, which are for storing."""
    claimed = tuple(map(str, subject.claimed("kv_dtype") or ()))
    return (*subject.dtypes("kv_dtype"), *(name for name in claimed if _only_stored(subject, name)))


def _only_stored(subject: Subject, name: str) -> bool:
    return is_scaled(name) and name not in subject.site.platform.info.dtypes


def scalings(subject: Subject) -> tuple[bool, ...]:
    """Whether scales are static: both ways where that is claimed."""
    return (False, True) if Feature.STATIC_CACHE_SCALES in subject.features else (False,)


def clash(kv_dtype: str, static: bool) -> bool:
    """Only 8-bit elements have scales."""
    return static and not is_scaled(kv_dtype)


def spread(x: torch.Tensor, plane: Plane, generator: torch.Generator, reach: float = NEAR) -> torch.Tensor:
    """``x`` [..., *plane.shape], with a magnitude of its own, up to 2**reach, for each row or group with a scale."""
    if plane.scaling not in ("row", "group"):
        return x
    parts = plane.shape[-1] // GROUP_SIZE if plane.scaling == "group" else 1
    reach = min(reach, _GROUPS_REACH) if plane.scaling == "group" else reach
    powers = (torch.rand(*x.shape[:-1], parts, generator=generator) * 2 - 1) * reach
    return x * powers.exp2().repeat_interleave(x.shape[-1] // parts, dim=-1)


def static_scales(layer: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Of keys and of values, each float32 [1] on the host; other ones for each layer."""
    k, v = (torch.tensor([scale * (1 + layer)]) for scale in _STATIC)
    return k, v


def set_scales(backend: AttentionBackend, device: torch.device, layer: int = 0) -> None:
    """Give a backend its scales of all keys and of all values, where it has some."""
    if backend.spec.static_cache_scales:
        k, v = static_scales(layer)
        backend.set_cache_scales(k.to(device), v.to(device))
