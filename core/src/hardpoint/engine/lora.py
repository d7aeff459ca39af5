"""LoRA adapters as requests name them, and the slots that a core keeps them in. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count

from hardpoint_plugin_api import CapacityError, ConfigError, EngineError, RequestError


@dataclass(frozen=True)
class LoRARequest:
    """The LoRA adapter of a prompt, with vLLM's names. It is loaded when it is first used.

    ``lora_path``: the folder of a PEFT adapter, or a hub id. Adapters are identified by ``lora_name``; ``lora_int_id``,
    above 0, exists for programs written for vLLM.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        if not self.lora_name:
            raise RequestError("lora_name is empty; give the adapter a name")
        if self.lora_int_id < 1:
            raise RequestError(f"lora_int_id must be above 0, got {self.lora_int_id}")

    def is_among(self, loaded: Iterable[Adapter]) -> bool:
        """Whether the adapter is loaded already."""
        return any((adapter.name, adapter.path) == (self.lora_name, self.lora_path) for adapter in loaded)


@dataclass(frozen=True)
class Adapter:
    """A loaded adapter. ``slot`` is where ranks hold it; ``number`` is never that of another one.

    ``path`` is the folder or hub id that was asked for, ``folder`` where it lies on the front end's machine, if known.
    """

    name: str
    path: str
    slot: int
    number: int
    folder: str = ""


NO_ADAPTER = Adapter("", "", -1, 0)
"""The adapter of requests that run with the model's own weights."""


class AdapterSlots:
    """The adapters of a core, by name; ``num_slots`` is 0 where it serves none."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._by_name: dict[str, Adapter] = {}
        self._numbers = count(1)

    def __iter__(self) -> Iterator[Adapter]:
        """The adapters that are loaded, in order of loading."""
        return iter(self._by_name.values())

    def find(self, name: str) -> Adapter:
        """The adapter of that name, NO_ADAPTER for an empty one. Raises RequestError."""
        if not name:
            return NO_ADAPTER
        check_loaded(name, self._by_name)
        return self._by_name[name]

    def assign(self, name: str, path: str, folder: str = "") -> Adapter:
        """An adapter in a free slot, to be added once it is loaded.

        Raises ConfigError where the engine serves no adapters, EngineError for a name that is taken, CapacityError
        where every slot is.
        """
        if not self._num_slots:
            raise ConfigError("the engine serves no LoRA adapters; start it with --enable-lora")
        if not name:
            raise ConfigError("the name of an adapter is empty; give it one")
        if name in self._by_name:
            raise EngineError(
                f"adapter {name!r} is loaded already, from {self._by_name[name].path}; unload it first, or choose "
                "another name"
            )
        free = set(range(self._num_slots)) - {adapter.slot for adapter in self}
        if not free:
            raise CapacityError(
                f"adapter {name!r} finds no slot: {', '.join(self._by_name)} fill all {self._num_slots}; unload one, "
                "or start with a higher --max-loras"
            )
        return Adapter(name, path, min(free), next(self._numbers), folder)

    def add(self, adapter: Adapter) -> None:
        """Note that ``adapter`` is loaded."""
        self._by_name[adapter.name] = adapter

    def remove(self, adapter: Adapter) -> None:
        """Forget an adapter, whose slot is free then."""
        del self._by_name[adapter.name]


def check_loaded(name: str, loaded: Iterable[str]) -> None:
    """Raise RequestError unless the adapter ``name`` is among those ``loaded``."""
    loaded = tuple(loaded)
    if name and name not in loaded:
        names = f"loaded are {', '.join(loaded)}" if loaded else "none is loaded"
        raise RequestError(f"no adapter {name!r} is loaded ({names}); load it first")
