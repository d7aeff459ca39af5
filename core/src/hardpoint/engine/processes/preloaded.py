"""The modules of an engine's core and ranks, imported by the server that their processes are forked from.

None of them starts a thread or looks for a device while it is imported. Plugins are not among them: an engine's
process imports the plugins that its engine selects.
"""

from hardpoint import fork_server
from hardpoint.garbage_collection import no_collections

with no_collections():  # children share the memory of these objects, to which no collection of theirs writes
    import torch  # noqa: F401

    import hardpoint.engine.core
    import hardpoint.engine.execution.ranks.rank_process
    import hardpoint.engine.execution.worker
    import hardpoint.engine.remote.core_process  # noqa: F401

fork_server.show_name(fork_server.NAME)
