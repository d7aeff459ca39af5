"""Kernels that a library must build before they can serve."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelBuild:
    """A build that a contribution needs before it can serve a workload; it may take minutes.

    A target class of the families attention, linear or op returns one from its optional class method
    ``pending_build(workload, device) -> KernelBuild | None``, which is asked after ``supports``. None: nothing is left
    to build. It must not build, nor open the device.

    An engine then starts with the next candidate, runs the build in a child process of low priority, and switches
    between two steps when ``pending_build`` returns None; to an op it switches at the next start. With
    ``--wait-for-kernels``, where the contribution was asked for by name, or where no other can serve, the contribution
    is constructed at once: it must then build on its own.

    ``title``: the name of the library, for the log. ``target``: the function to call in the child process,
    ``"package.module:function"``, with ``arguments``. It raises an exception where the build fails. Equal builds run
    once.
    """

    title: str
    target: str
    arguments: tuple[str, ...] = ()
