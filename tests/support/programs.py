"""Commands of Python programs in processes that begin with torch imported: a server forks them, see ``fork_server``.

A process that imports torch does little else for two seconds, and a page of the documentation starts dozens. The server
belongs to one environment (``environment.py``) and runs its Python; ``CLIENT`` is the program that a shell starts.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import site
import socket
import sys
import sysconfig
import threading
from collections.abc import Mapping
from contextlib import suppress
from importlib import invalidate_caches
from multiprocessing.connection import Connection, wait
from pathlib import Path

from hardpoint import fork_server

ROOT = str(Path(__file__).resolve().parents[2])
MODULES = ("hardpoint.conformance.nursery",)
"""Modules that these processes begin with; the conformance kit's own processes need them, too."""

LENGTH = 8
"""Bytes that say how long a request is."""

CLIENT = """
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect(sys.argv[1])
    request = json.dumps([sys.argv[2:], os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [len(request).to_bytes(8, "big")], [1, 2])
    server.sendall(request)
    code = int(server.recv(16) or 1)
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""
"""Started with the server's address, a module, and the arguments of that; takes the program's output and exit code."""

_OF_THE_SHELL = {"_", "OLDPWD", "PWD", "SHLVL"}


def serve(address: str) -> None:
    """Run programs for clients until standard input is closed, which is held by the process that started this."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        print("ready", flush=True)
        while listener in wait([listener, sys.stdin.fileno()]):
            client, _ = listener.accept()
            threading.Thread(target=_serve, args=(client,), daemon=True).start()


def _serve(client: socket.socket) -> None:
    with client:
        head, streams, _, _ = socket.recv_fds(client, LENGTH, 2)
        with client.makefile("rb") as file:
            arguments, folder, variables = json.loads(file.read(int.from_bytes(head, "big")))
        with Connection(streams[0]) as out, Connection(streams[1]) as err:
            process = fork_server.start(
                _run, (out, err, arguments, folder, variables), "program", MODULES, imports_main=False
            )
        if client in wait([process.sentinel, client]):  # a client says nothing more: it was killed
            process.kill()
        process.join()
        with suppress(OSError):
            client.sendall(str(process.exitcode).encode())


def _run(out: Connection, err: Connection, arguments: list[str], folder: str, variables: Mapping[str, str]) -> None:
    """Run a module as ``python -m`` would, with what the client has of the streams, the folder and the environment."""
    for stream, given in enumerate((out, err), 1):
        os.dup2(given.fileno(), stream)
        given.close()
    os.chdir(folder)
    os.environ.update({name: value for name, value in variables.items() if name not in _OF_THE_SHELL})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, fork_server.GROUP_SIGNALS)
    sys.path[:] = [folder, *(path for path in sys.path if path not in ("", ROOT))]
    site.addsitedir(sysconfig.get_path("purelib"))  # reads what was installed since
    invalidate_caches()
    sys.argv = arguments
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
