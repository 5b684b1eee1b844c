"""Whether other ranks' processes exist, and their last words: a connection to each, silent until something fails.

However a process ends, its system closes its connections at once; nothing tells more surely that it is gone. A rank
that stops because of another says so on the same connection first, so a rank that finds it closed has read why. Neither
needs the store, which may have ended with the rank that kept it, nor a process group, which breaks as soon as one rank
does.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = ["NotThere", "Presence", "here", "say_everywhere"]

MOST_SAID = 1 << 20
"""Bytes that are kept of what a rank says; a process that says more is no rank of ours."""
LONGEST_HELLO = 256
TURN_S = 0.02
SEND_S = 1.0
CONNECT_S = 5.0
INTERFACE = 0x8915
"""``SIOCGIFADDR``: the address of a network interface by its name."""

_every: weakref.WeakSet[Presence] = weakref.WeakSet()
_now: tuple[weakref.ref[Any], Presence] | None = None


class NotThere(RuntimeError):
    """The ranks ``ranks`` (global numbers) could not be reached in time, or were gone.

    ``came`` says whether they had come to the meeting.
    """

    def __init__(self, ranks: Sequence[int], came: bool) -> None:
        super().__init__(f"ranks {list(ranks)} cannot be reached")
        self.ranks, self.came = tuple(ranks), came


@dataclass
class Peer:
    """A connection to one rank, and what was received on it."""

    socket: socket.socket
    heard: list[dict[str, Any]] = field(default_factory=list)
    rest: bytes = b""
    size: int = 0
    gone: bool = False

    def __post_init__(self) -> None:
        self.socket.setblocking(False)

    def tell(self, line: bytes) -> None:
        """Send ``line``, unless the other end is gone or accepts nothing."""
        with contextlib.suppress(OSError):
            self.socket.settimeout(SEND_S)
            self.socket.sendall(line)
        with contextlib.suppress(OSError):
            self.socket.setblocking(False)

    def listen(self) -> None:
        """Read what has arrived, without waiting."""
        while not self.gone:
            try:
                data = self.socket.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            self.size += len(data)
            self.gone = not data or self.size > MOST_SAID
            *lines, self.rest = (self.rest + data).split(b"\n")
            for line in lines:
                with contextlib.suppress(ValueError):
                    entry = json.loads(line)
                    if isinstance(entry, dict):
                        self.heard.append(entry)


class Presence:
    """This process's connections to other ranks, by global rank.

    :meth:`meet` makes them, and they last until the process ends.
    """

    def __init__(self) -> None:
        self._peers: dict[int, Peer] = {}
        self._lock = threading.RLock()
        _every.add(self)

    def meet(self, ranks: Iterable[int], name: str, timeout: float) -> None:
        """Connect with those of ``ranks`` that are not connected. All of them call this with the same ``name``.

        Raises :class:`NotThere` after ``timeout`` seconds, or as soon as a rank that came is gone.
        """
        me = dist.get_rank()
        with self._lock:
            missing = {r for r in ranks if r != me and (r not in self._peers or self._peers[r].gone)}
        if missing:
            with _listening() as listener:
                connected = _Meeting(me, missing, name, listener).held(timeout)
            with self._lock:
                self._peers.update(connected)

    def say(self, ranks: Iterable[int], entry: dict[str, Any]) -> None:
        """Send ``entry``, plain JSON values, to those of ``ranks`` that are not gone."""
        line = json.dumps(entry).encode() + b"\n"
        with self._lock:
            for rank in ranks:
                peer = self._peers.get(rank)
                if peer is not None and not peer.gone:
                    peer.tell(line)

    def ranks(self) -> list[int]:
        """The ranks to which there are connections."""
        with self._lock:
            return list(self._peers)

    def news(self, ranks: Iterable[int]) -> tuple[dict[int, list[dict[str, Any]]], set[int]]:
        """What each of ``ranks`` has said, including what it said before it went, and the set of the gone."""
        heard, gone = {}, set()
        with self._lock:
            for rank in ranks:
                if (peer := self._peers.get(rank)) is not None:
                    peer.listen()
                    heard[rank] = list(peer.heard)
                    gone |= {rank} if peer.gone else set()
        return heard, gone

    def forget(self) -> None:
        """Close this process's copies of the connections.

        It is for a forked child, which is not the rank and would keep the connections open.
        """
        for peer in self._peers.values():
            peer.socket.close()
            peer.gone = True


def here() -> Presence:
    """The connections of the default process group."""
    global _now
    world: Any = dist.group.WORLD
    if _now is None or _now[0]() is not world:
        _now = weakref.ref(world), Presence()
    return _now[1]


def say_everywhere(entry: dict[str, Any]) -> None:
    """Send ``entry`` to every rank that this process was ever connected with."""
    for presence in list(_every):
        presence.say(presence.ranks(), entry)


def _forget() -> None:
    """Drop all connections in a forked child."""
    global _now
    _now = None
    for presence in list(_every):
        presence._lock = threading.RLock()  # whoever held it does not live here
        presence.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


class _Meeting:
    """The search of rank ``me`` and ranks ``missing`` for each other. Of two ranks the higher connects to the lower."""

    def __init__(self, me: int, missing: set[int], name: str, listener: socket.socket) -> None:
        self._me, self._missing, self._name, self._listener = me, missing, name, listener
        self._store = distributed_c10d._get_default_store()
        self._token = secrets.token_hex(16)
        self._found: dict[int, Peer] = {}
        self._asked: dict[socket.socket, int] = {}
        self._asking: dict[socket.socket, bytes] = {}

    def held(self, timeout: float) -> dict[int, Peer]:
        """Hold the meeting and return the connections. Raises :class:`NotThere` after ``timeout`` seconds."""
        place = {"port": self._listener.getsockname()[1], "hosts": _hosts(self._store), "host": _host()}
        self._store.set(self._key(self._me), json.dumps({**place, "token": self._token}))
        deadline = time.monotonic() + timeout
        try:
            while set(self._found) != self._missing:
                if time.monotonic() > deadline:
                    self._late()
                for rank in sorted(self._missing - set(self._found) - set(self._asked.values())):
                    if rank < self._me and self._store.check([self._key(rank)]):
                        self._ask(rank)
                self._turn()
        finally:
            for stranger in (*self._asked, *self._asking):
                stranger.close()
        return self._found

    def _key(self, rank: int) -> str:
        """The store's key for the address of ``rank``."""
        return f"{self._name}/at/{rank}"

    def _late(self) -> None:
        """Raise :class:`NotThere`, for ranks that did not come or else for those that could not be reached."""
        late = sorted(self._missing - set(self._found))
        absent = [rank for rank in late if not self._store.check([self._key(rank)])]
        raise NotThere(absent or late, came=not absent)

    def _ask(self, rank: int) -> None:
        """Connect to ``rank`` and introduce this rank. Raises :class:`NotThere`."""
        place = json.loads(self._store.get(self._key(rank)))
        hosts = ["127.0.0.1"] if place["host"] == _host() else place["hosts"]
        for host in hosts:
            with contextlib.suppress(OSError):
                connection = socket.create_connection((host, int(place["port"])), CONNECT_S)
                connection.sendall(f"{self._me} {place['token']}\n".encode())
                self._asked[connection] = rank
                return
        raise NotThere([rank], came=True)

    def _turn(self) -> None:
        """Handle the events of one moment."""
        ready, _, _ = select.select([self._listener, *self._asked, *self._asking], [], [], TURN_S)
        for connection in ready:
            if connection is self._listener:
                stranger, _ = self._listener.accept()
                self._asking[stranger] = b""
            elif connection in self._asked:
                rank = self._asked.pop(connection)
                with contextlib.suppress(OSError):
                    if connection.recv(1) == b"+":
                        self._found[rank] = Peer(connection)
                        continue
                connection.close()
                raise NotThere([rank], came=True)
            else:
                self._introduced(connection)

    def _introduced(self, connection: socket.socket) -> None:
        """Accept a rank that names itself and knows the token; turn anybody else away."""
        data = b""
        with contextlib.suppress(OSError):
            data = connection.recv(LONGEST_HELLO, socket.MSG_DONTWAIT)
        line = self._asking.pop(connection) + data
        if data and b"\n" not in line and len(line) < LONGEST_HELLO:
            self._asking[connection] = line
            return
        greeting, _, _ = line.partition(b"\n")
        rank, _, token = greeting.decode(errors="replace").partition(" ")
        expected = rank.isdecimal() and int(rank) in self._missing - set(self._found) and int(rank) > self._me
        if expected and secrets.compare_digest(token.encode(), self._token.encode()):
            connection.sendall(b"+")
            self._found[int(rank)] = Peer(connection)
        else:
            connection.close()


def _listening() -> socket.socket:
    """A socket that listens on all addresses of this host, on a free port."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def _host() -> str:
    """Text that tells this host, and its network namespace, from others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def _hosts(store: Any) -> list[str]:
    """The addresses at which other hosts may reach this one, the most likely first."""
    addresses: list[str] = []
    probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with probe:
        for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(","):
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.strip()[:15].encode())
                addresses.append(socket.inet_ntoa(fcntl.ioctl(probe.fileno(), INTERFACE, request)[20:24]))
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        if hasattr(store, "host"):
            with contextlib.suppress(OSError):
                probe.connect((store.host, store.port))  # sends nothing: it asks which of our addresses leads there
                addresses.append(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        addresses += [
            str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        ]
    return [host for host in dict.fromkeys(addresses) if not host.startswith("127.") and host != "::1"]
