"""Hosts for tests: network namespaces on one machine, joined by a switch.

Each has an address, a network of its own and no sockets in common with the others, so that ranks in
two of them cannot share memory, as on two machines. Where namespaces cannot be made (that takes
rights which some containers lack), ranks are told that they are on several hosts, and a link is cut
by killing the ranks behind it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

from symm_cp.testing import Place, Running

_SWITCH = "switch"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Fabric:
    """Some hosts on a switch."""

    def __init__(self, hosts: int) -> None:
        self._names = [f"symmcp-{os.getpid()}-{host}" for host in range(hosts)]
        self._hub = f"symmcp-{os.getpid()}-hub"
        self.hosts = hosts
        self.real = True

    def _in(self, name: str, *words: str) -> None:
        _ip("-n", name, *words)

    def build(self) -> None:
        """Makes the namespaces and the links."""
        _ip("netns", "add", self._hub)
        self._in(self._hub, "link", "add", _SWITCH, "type", "bridge")
        self._in(self._hub, "link", "set", _SWITCH, "up")
        for host, name in enumerate(self._names):
            port = f"port{host}"
            _ip("netns", "add", name)
            self._in(self._hub, "link", "add", port, "type", "veth", "peer", "eth0", "netns", name)
            self._in(self._hub, "link", "set", port, "master", _SWITCH, "up")
            self._in(name, "addr", "add", f"10.91.0.{host + 1}/24", "dev", "eth0")
            self._in(name, "link", "set", "eth0", "up")
            self._in(name, "link", "set", "lo", "up")

    def remove(self) -> None:
        """Removes the namespaces that exist."""
        for name in (*self._names, self._hub):
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                _ip("netns", "del", name)

    def cut(self, host: int, ranks: Running, per_host: int) -> list[int]:
        """Cuts the link of a host; returns the surviving ranks."""
        everybody = range(self.hosts * per_host)
        if self.real:
            self._in(self._hub, "link", "set", f"port{host}", "down")
            return list(everybody)
        ranks.kill(*(rank for rank in everybody if rank // per_host == host))
        return [rank for rank in everybody if rank // per_host != host]

    def place(self, host: int) -> Place:
        """The place where the ranks of a host run."""
        if not self.real:
            return Place(environment={"SYMM_CP_HOST": f"host {host}"})
        return Place(self._names[host], {"GLOO_SOCKET_IFNAME": "eth0"})


@contextlib.contextmanager
def fabric(hosts: int) -> Iterator[Fabric]:
    """Builds hosts on a switch, and removes them at the end."""
    made = Fabric(hosts)
    try:
        try:
            made.build()
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"no network namespaces here: {error}")
            made.real = False
        yield made
    finally:
        made.remove()
