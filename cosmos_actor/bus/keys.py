"""Who holds which key. One file a role: its own key pair and the public keys of the run's roles.

A key binds to a role: whoever connects with it is that role and nothing else. Files are 0600 in a folder of 0700.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Iterable, Mapping, Optional, Union

from .errors import KeyFileError

PathLike = Union[str, "os.PathLike[str]"]
Z85 = frozenset("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#")
"""ZeroMQ RFC 32."""
MAX_FILE_BYTES = 1 << 20
"""Ten thousand roles. A device or a pipe under that name would be read for ever."""


@dataclass(frozen=True)
class KeyRing:
    """The own key pair and the allow-list of one role (Z85 text)."""

    run_id: str
    role: str
    public: str
    secret: str
    peers: Mapping[str, str]
    """role -> public key; a key that is not here is nobody."""

    def __repr__(self) -> str:
        return f"KeyRing(run_id={self.run_id!r}, role={self.role!r}, peers={sorted(self.peers)})"

    def key_of(self, role: str) -> str:
        """The public key of a role; KeyFileError if the list does not know it."""
        if role not in self.peers:
            raise KeyFileError(f"no key for role {role!r}; the list has {', '.join(sorted(self.peers))}", peer=role)
        return self.peers[role]

    def role_of(self, public: str) -> Optional[str]:
        """The role a public key belongs to, or None."""
        return next((role for role, key in self.peers.items() if key == public), None)

    @classmethod
    def load(cls, path: PathLike) -> KeyRing:
        """Read one role's file. KeyFileError: missing, readable by others, or not a key file."""
        path = Path(path)
        try:
            found = path.stat()
            mode = stat.S_IMODE(found.st_mode)
            if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_FILE_BYTES:
                raise KeyFileError(f"{path} is not a key file", setting="keys")
            if mode & 0o077:
                raise KeyFileError(f"{path} has mode {mode:04o}: others can read it; chmod 600", setting="keys")
            return cls.parse(path.read_bytes(), str(path))
        except OSError as error:
            raise KeyFileError(f"{path}: {error.strerror}", setting="keys") from None

    @classmethod
    def parse(cls, content: bytes, name: str) -> KeyRing:
        """What such a file holds. KeyFileError, which says `name`: it is not that."""
        try:
            loaded = json.loads(content.decode("ascii"))
            ring = cls(**{field: loaded[field] for field in ("run_id", "role", "public", "secret", "peers")})
            if not all(map(_is_key, (ring.public, ring.secret, *ring.peers.values()))):
                raise ValueError
            if type(ring.run_id) is not str or type(ring.role) is not str:
                raise ValueError
            return ring
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise KeyFileError(f"{name} is not a key file", setting="keys") from None


def make_run_keys(directory: PathLike, run_id: str, roles: Iterable[str]) -> Dict[str, Path]:
    """Write a fresh ``<role>.key`` for every role into the folder (made if missing); role -> path."""
    import zmq  # here: reading and checking key files needs no library

    folder = Path(directory)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    pairs = {role: zmq.curve_keypair() for role in sorted(set(roles))}
    peers = {role: public.decode() for role, (public, _) in pairs.items()}
    paths = {}
    for role, (public, secret) in pairs.items():
        content = {"run_id": run_id, "role": role, "public": public.decode(), "secret": secret.decode(), "peers": peers}
        paths[role] = _write_private(folder / f"{role}.key", json.dumps(content, indent=1))
    return paths


def _is_key(text: object) -> bool:
    """Whether a text is 32 bytes in Z85. libzmq takes nothing else, and fails far from the file that had it."""
    return isinstance(text, str) and len(text) == 40 and set(text) <= Z85


def _write_private(path: Path, text: str) -> Path:
    fresh = path.with_suffix(".fresh")
    fresh.unlink() if fresh.exists() else None
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    os.replace(fresh, path)
    return path
