"""Users of the cache: the parts of a model that keep something of its sequences from one step to the next."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

from hardpoint_plugin_api.attention import StepPlanner
from hardpoint_plugin_api.cache import CacheLayout, CacheSpec


@dataclass(frozen=True)
class CacheUser:
    """One cache of one layer: where the layer is (``path``), what it keeps, how a page is laid out, what plans for it.

    Users of one block table with an equal ``plan_key`` share one plan: ``planner`` of the first prepares each step for
    all of them. A layer may be several users, each with a cache of its own.
    """

    path: str
    spec: CacheSpec
    layout: CacheLayout
    planner: StepPlanner
    plan_key: Hashable


class CacheUsers(Protocol):
    """Where the layers of a model under construction declare the caches that they use."""

    def add(self, user: CacheUser) -> int:
        """Declare a user and return its number: its place in ``caches`` and ``metadata`` of every step."""
        ...
