"""A remote shell as ssh is one, for where no sshd is.

What it runs is no child of its client, and hears of the client's death by the end of its input only.

    remote_shell serve SOCKET               the node
    remote_shell run SOCKET WORD...         the launcher: words are joined with spaces, a shell there parses them

Variables are not carried. Output comes back, and the exit code as its last byte; 255 where the node is not reached.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading

LINE_BYTES = 1 << 16
PLAIN_ENVIRONMENT = {"PATH": os.defpath, "HOME": "/"}


def serve(path: str) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    while True:
        client, _ = listener.accept()
        threading.Thread(target=_session, args=(client,), daemon=True).start()


def _session(client: socket.socket) -> None:
    command = b""
    while not command.endswith(b"\0"):
        command += client.recv(1)
    shell = subprocess.Popen(["sh", "-c", command[:-1].decode()], env=PLAIN_ENVIRONMENT, cwd="/", stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, bufsize=0)
    threading.Thread(target=_to_the_shell, args=(client, shell), daemon=True).start()
    assert shell.stdout is not None
    while output := shell.stdout.read(LINE_BYTES):
        _send(client, output)
    _send(client, bytes([shell.wait() % 256]))
    with contextlib.suppress(OSError):  # the client has gone first
        client.shutdown(socket.SHUT_RDWR)


def _to_the_shell(client: socket.socket, shell: subprocess.Popen[bytes]) -> None:
    assert shell.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended
        while given := _received(client):
            shell.stdin.write(given)
    shell.stdin.close()


def _received(client: socket.socket) -> bytes:
    try:
        return client.recv(LINE_BYTES)
    except OSError:
        return b""


def _send(client: socket.socket, output: bytes) -> None:
    try:
        client.sendall(output)
    except OSError:
        pass  # nobody is there to read


def run(path: str, words: list[str]) -> int:
    node = socket.socket(socket.AF_UNIX)
    try:
        node.connect(path)
    except OSError as error:
        print(f"remote_shell: connect to {path}: {error.strerror}", file=sys.stderr)
        return 255
    node.sendall(" ".join(words).encode() + b"\0")
    threading.Thread(target=_forward_input, args=(node,), daemon=True).start()
    kept = b""
    while output := node.recv(LINE_BYTES):
        os.write(1, (kept + output)[:-1])
        kept = output[-1:]
    return kept[0] if kept else 255


def _forward_input(node: socket.socket) -> None:
    while given := os.read(0, LINE_BYTES):
        node.sendall(given)
    node.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    sys.exit(run(sys.argv[2], sys.argv[3:]))
