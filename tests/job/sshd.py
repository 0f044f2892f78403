"""A real sshd on this host, for one test module: its own keys and port, and a configuration of ssh that leads to it."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.waiting import eventually

PLACES = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"])
SERVER = """
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
StrictModes no
UsePAM no
PidFile none
PermitRootLogin yes
"""
CLIENT = """
Host *
HostName 127.0.0.1
Port {port}
User {user}
IdentityFile {folder}/user
BatchMode yes
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
"""


def skip_reason() -> str | None:
    """None: an sshd can be started here, as far as one sees."""
    missing = [name for name in ("ssh", "sshd", "ssh-keygen") if shutil.which(name, path=PLACES) is None]
    return f"there is no {' and no '.join(missing)} (Debian: openssh-server)" if missing else None


def start(folder: Path, popen: Callable[..., subprocess.Popen[Any]]) -> Path:
    """The server runs; the configuration file for `ssh -F`."""
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True,
                       timeout=30)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name, text in (("server", SERVER), ("client", CLIENT)):
        (folder / name).write_text(text.format(port=port, folder=folder, user=getpass.getuser()))
    said = (folder / "said").open("wb")
    with said:
        server = popen([shutil.which("sshd", path=PLACES), "-D", "-e", "-f", str(folder / "server")], stderr=said)
    eventually(lambda: server.poll() is not None or answers(port), "an sshd that answers", within_s=20.0)
    assert server.poll() is None, (folder / "said").read_text()
    return folder / "client"


def answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return True
    except OSError:
        return False
