"""Two hosts on this one: network namespaces whose only way to each other is a cable of two virtual devices."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2")
"""Of the first and of the second host."""

_UNSHARE = ["unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
"""Processes end with ``unshare`` itself, whatever becomes of them. See unshare(1)."""

_SCRIPT = """
set -e
unshare --net sleep infinity & other=$!
until [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
enter="nsenter --target $other --net"
ip link add left type veth peer name right
ip link set right netns $other
ip addr add {addresses[0]}/24 dev left
ip link set left up
ip link set lo up
$enter ip addr add {addresses[1]}/24 dev right
$enter ip link set right up
$enter ip link set lo up
set +e
$enter sh -c {second} > {folder}/1.out 2> {folder}/1.err & there=$!
sh -c {first} > {folder}/0.out 2> {folder}/0.err
echo $? > {folder}/0.code
wait $there
echo $? > {folder}/1.code
for try in {{1..100}}; do
    : > {folder}/left
    for each in /proc/[0-9]*; do
        case $each in /proc/1 | /proc/$other) ;; *) echo $(tr '\\0' ' ' < $each/cmdline) >> {folder}/left ;; esac
    done
    [ -s {folder}/left ] || break
    sleep 0.1
done
"""
"""Bash is the process 1 here, and waits for orphans; those that live on for ten seconds are left."""


def can_be_made() -> bool:
    """Whether this machine lets a user make network namespaces."""
    try:
        found = [subprocess.run(each, capture_output=True, check=False) for each in ([*_UNSHARE, "true"], ["ip", "-V"])]
    except FileNotFoundError:
        return False
    return all(done.returncode == 0 for done in found)


def run_on_two_hosts(
    commands: Sequence[Sequence[str]], folder: Path, env: Mapping[str, str], timeout: float
) -> list[subprocess.CompletedProcess[str]]:
    """Run one command on each host, at the same time, and return how each ended; ``folder`` takes what they write.

    No process of theirs may outlive them.
    """
    first, second = (shlex.quote(shlex.join(command)) for command in commands)
    script = _SCRIPT.format(addresses=ADDRESSES, first=first, second=second, folder=shlex.quote(str(folder)))
    done = subprocess.run(
        [*_UNSHARE, "bash", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
        env=os.environ | env,
    )
    assert done.returncode == 0, done.stderr
    assert not (left := (folder / "left").read_text()), f"processes that are left:\n{left}"
    read = [[(folder / f"{host}.{kind}").read_text() for kind in ("code", "out", "err")] for host in (0, 1)]
    return [
        subprocess.CompletedProcess(list(command), int(code), out, err)
        for command, (code, out, err) in zip(commands, read, strict=True)
    ]
