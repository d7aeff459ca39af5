"""Ranks in actors of a Ray cluster, one each, on as many hosts as it takes.

The engine's process is Ray's driver. It asks Ray for a placement group with a bundle for each rank, and for an actor in
each bundle. From then on it talks to the ranks by sockets, as ``torchrun``'s rank 0 does; Ray says which actor is gone.
Written for Ray 2.40 and later: https://docs.ray.io/en/latest/ray-core/scheduling/placement-group.html
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import TYPE_CHECKING, Any

from hardpoint.engine.execution.ranks.meeting import await_word, leave_word, meeting_place, servers_store
from hardpoint.engine.execution.ranks.rank_process import Rank, RankReady, RankReport, RankSpec, end_with_parent
from hardpoint.engine.execution.ranks.ranks_executor import RankLink, RanksExecutor
from hardpoint.engine.execution.ranks.sockets import set_up, shut
from hardpoint.engine.processes import child_process
from hardpoint.extras import require_extra
from hardpoint.garbage_collection import keep_what_is_there
from hardpoint.parallel.choices import Choices
from hardpoint.parallel.process_group import LOOPBACK, PrefixStore, Store, tcp_store
from hardpoint.parallel.topology import Coordinates
from hardpoint_plugin_api import EngineDeadError, EngineError

if TYPE_CHECKING:
    from hardpoint.config import EngineConfig
    from hardpoint.engine.blueprint import Blueprint

logger = logging.getLogger(__name__)

_WATCH_SECONDS = 1.0
_PLACING_SECONDS = 60.0


@dataclass(frozen=True)
class Link:
    """How an actor reaches the engine's process: the socket for commands, its key, and the store where ranks meet.

    Ranks of several servers meet at the servers' store instead.
    """

    host: str
    port: int
    key: bytes
    store_port: int


@dataclass(frozen=True)
class Spot:
    """Where Ray has put an actor. ``has_own_devices``: it sees the accelerators that Ray gave it, and no others."""

    node: str
    has_own_devices: bool


class RankActor:
    """The class of the actors. Its methods run in the process that Ray started for it."""

    def spot(self) -> Spot:
        """The node and the device of the rank."""
        import ray

        context = ray.get_runtime_context()
        return Spot(context.get_node_id(), any(context.get_accelerator_ids().values()))

    def serve(self, spec: RankSpec, link: Link, levels: dict[str, int]) -> None:
        """Serve as a rank until the engine is closed or gone."""
        connection = set_up(Client((link.host, link.port), authkey=link.key))
        connection.send(spec.place.rank)
        send = child_process.Sender(connection)
        child_process.log_by(send, levels)
        rank = Rank(spec)
        end_with_parent(rank, connection, os.getppid(), send)

        def report(message: RankReport) -> None:
            if isinstance(message, RankReady):
                keep_what_is_there()
            send(message)

        def meet() -> Store:
            if spec.config.rendezvous is not None:
                return servers_store(spec.config)
            store = tcp_store(link.host, link.store_port, float(spec.config.core_start_timeout))
            return PrefixStore("hardpoint", store)

        rank.run(meet, report)


class RayRank(RankLink):
    """A rank in an actor; ``serving`` is Ray's reference to the end of its method ``serve``."""

    def __init__(self, number: int, connection: Connection, actor: Any, serving: Any) -> None:
        super().__init__(number, connection)
        self._actor, self.serving = actor, serving

    def join(self, seconds: float) -> None:
        """See RankLink."""
        import ray

        ray.wait([self.serving], timeout=seconds)

    def end(self) -> None:
        """See RankLink."""
        import ray

        ray.kill(self._actor)
        if not self.connection.closed:
            shut(self.connection)

    def obituary(self) -> str:
        """See RankLink."""
        import ray

        try:
            ray.get(self.serving, timeout=_WATCH_SECONDS)
            why = "its method returned"
        except Exception as error:  # Ray's own, by the kind of failure
            why = " ".join(str(error).split())
        return f"the Ray actor of rank {self.number} is gone: {why}"


class RayExecutor(RanksExecutor):
    """Has Ray start the ranks, and ends them with itself."""

    def __init__(self, blueprint: Blueprint) -> None:
        """Start the ranks and wait until they are loaded.

        Raises ConfigError where Ray is not installed, EngineError where the cluster has no room for the ranks, and what
        the first rank raises.
        """
        require_extra("ray", "--executor ray")
        import ray

        config, patience = blueprint.config, float(blueprint.config.core_start_timeout)
        if not ray.is_initialized():
            ray.init(logging_level=logging.WARNING)  # a running cluster, by RAY_ADDRESS or of this host; else a new one
        self._group = _placed(config.topology.size, blueprint.ctx.device.accelerator, min(patience, _PLACING_SECONDS))
        actors = _actors(self._group, config.topology.size)
        try:
            ranks, self._store = _started(blueprint, actors, patience)
        except BaseException:
            for actor in actors:
                ray.kill(actor)
            self._remove_group()
            raise
        threading.Thread(target=_watch, args=(ranks,), name="hardpoint-ray-watcher", daemon=True).start()
        super().__init__(config, ranks)

    def give_up(self, reason: str) -> EngineDeadError:
        """See RanksExecutor."""
        lost = super().give_up(reason)
        self._remove_group()
        return lost

    def _remove_group(self) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        if ray.is_initialized():  # else the program has ended Ray, which ends all
            remove_placement_group(self._group)


def _placed(ranks: int, on_accelerators: bool, patience: float) -> Any:
    """A placement group with a bundle for each rank, on few hosts. Raises EngineError where there is no room."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    bundle = {"CPU": 1.0} | ({"GPU": 1.0} if on_accelerators else {})
    group = placement_group([bundle] * ranks, strategy="PACK")
    try:
        ray.get(group.ready(), timeout=patience)
    except ray.exceptions.GetTimeoutError:
        remove_placement_group(group)
        free = {name: ray.available_resources().get(name, 0.0) for name in bundle}
        raise EngineError(
            f"the Ray cluster has no room for {ranks} ranks of {bundle} each within {patience:g} seconds; free are "
            f"{free}: add nodes, end what holds them, or ask for fewer ranks"
        ) from None
    return group


def _actors(group: Any, ranks: int) -> list[Any]:
    """An actor in each bundle."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    remote: Any = ray.remote(RankActor)
    resources = {"num_cpus": group.bundle_specs[0]["CPU"], "num_gpus": group.bundle_specs[0].get("GPU", 0)}
    return [
        remote.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i), **resources
        ).remote()
        for i in range(ranks)
    ]


def places_of(blueprint: Blueprint, spots: Sequence[Spot], others: Sequence[str] = ()) -> list[tuple[int, Coordinates]]:
    """For each rank in order, which of ``spots`` is its own, and its place: ranks of one host have successive numbers.

    A rank that sees its own accelerators alone is the only one on its host as far as device numbers go. ``others`` are
    the nodes of replicas that share experts with this one.
    """
    topology, nodes = blueprint.config.topology, [spot.node for spot in spots]
    order = sorted(range(len(spots)), key=lambda i: nodes.index(nodes[i]))
    found = []
    for rank, index in enumerate(order):
        spot, before = spots[index], [nodes[i] for i in order[:rank]]
        local = (0, 1) if spot.has_own_devices else (before.count(spot.node), nodes.count(spot.node))
        on_one_host = topology.here is None and len({*nodes, *others}) == 1
        found.append((index, Coordinates(topology, rank, *local, on_one_host=on_one_host)))
    return found


def _started(blueprint: Blueprint, actors: Sequence[Any], patience: float) -> tuple[list[RayRank], Any]:
    """The ranks, which load, and the store where they meet; it must live as long, since collective libraries go back to
    it whenever two ranks first talk. Raises EngineDeadError for one that does not call within ``patience`` seconds.

    A caller must show a key that is passed on through Ray alone, since messages from these sockets are unpickled.
    """
    import ray

    config, spots = blueprint.config, ray.get([actor.spot.remote() for actor in actors], timeout=patience)
    store, others = _met(config, [spot.node for spot in spots], patience)
    places = places_of(blueprint, spots, others)
    is_local = places[0][1].on_one_host
    host, key, world = LOOPBACK if is_local else ray.util.get_node_ip_address(), secrets.token_bytes(32), len(actors)
    # The blueprint is of ranks on one host. On several, other communicators may serve: then ranks compare theirs.
    choices, levels = Choices.of(blueprint) if is_local else None, child_process.log_levels()
    with Listener((host, 0), backlog=world, authkey=key) as listener:
        link = Link(host, listener.address[1], key, 0 if store is None else store.port)
        listener._listener._socket.settimeout(patience)  # type: ignore[attr-defined]  # there is no public way
        serving = {
            place.rank: (actors[index], actors[index].serve.remote(RankSpec(config, place, choices), link, levels))
            for index, place in places
        }
        found: dict[int, RayRank] = {}
        while len(found) < world:
            try:
                connection = set_up(listener.accept())
            except (AuthenticationError, EOFError, ConnectionError):  # a stranger
                continue
            except TimeoutError:
                missing = sorted(set(range(world)) - set(found))
                raise EngineDeadError(
                    f"of Ray's actors, ranks {missing} did not reach {host}:{link.port} within {patience:g} seconds "
                    "(--core-start-timeout); nodes of the cluster must reach each other at any port"
                ) from None
            number: int = connection.recv()
            found[number] = RayRank(number, connection, *serving[number])
    return [found[number] for number in range(world)], store


def _met(config: EngineConfig, nodes: Sequence[str], patience: float) -> tuple[Any, Sequence[str]]:
    """The store where ranks meet, which the engine's process serves, or that of replica 0 where replicas share experts,
    None where these belong to several servers; and the nodes of their ranks, given those of this one's. Raises
    EngineDeadError where another does not come."""
    topology = config.topology
    if config.rendezvous is not None:
        return None, ()
    if not topology.shares_experts:
        return tcp_store(LOOPBACK, 0, patience, serves=True), ()
    place = meeting_place(config, "store-of-replica-0")
    if topology.replica:
        store = tcp_store(LOOPBACK, int(await_word(place, patience)), patience)
    else:
        store = tcp_store(LOOPBACK, 0, patience, serves=True)
        leave_word(place, str(store.port))
    known = PrefixStore("nodes", store)
    known.set(str(topology.replica), " ".join(nodes))
    try:
        told = [known.get(str(replica)).decode() for replica in range(topology.data)]
    except RuntimeError as error:
        raise EngineDeadError(f"a replica, with which this one shares experts, did not come: {error}") from error
    return store, " ".join(told).split()


def _watch(ranks: Sequence[RayRank]) -> None:
    """End the connection of a rank whose actor Ray says is gone: a host that is switched off closes none."""
    import ray

    left = list(ranks)
    while left and ray.is_initialized():
        ended, _ = ray.wait([rank.serving for rank in left], timeout=_WATCH_SECONDS)
        for rank in [rank for rank in left if rank.serving in ended]:
            left.remove(rank)
            if not rank.connection.closed:
                shut(rank.connection)
