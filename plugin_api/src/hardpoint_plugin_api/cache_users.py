"""Cache users: the parts of a model that keep data of a sequence, such as keys and values, from step to step."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

from hardpoint_plugin_api.attention import StepPlanner
from hardpoint_plugin_api.cache import CacheLayout, CacheSpec


@dataclass(frozen=True)
class CacheUser:
    """One cache of one layer: the layer's ``path``, the cache's planes, their layout in a page, and its step planner.

    Users with an equal ``plan_key`` in one block table share one plan: ``planner`` of the first prepares each step for
    all of them. A layer may be several users, each with a cache of its own.
    """

    path: str
    spec: CacheSpec
    layout: CacheLayout
    planner: StepPlanner
    plan_key: Hashable


class CacheUsers(Protocol):
    """The registry of a model under construction, in which layers declare the caches that they use."""

    def add(self, user: CacheUser) -> int:
        """Declare a user. Returns its number: its index in ``caches`` and ``metadata`` of every step."""
        ...
