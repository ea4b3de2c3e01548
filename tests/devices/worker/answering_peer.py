"""The other process in a test of shared-memory frames: it answers questions and sleeps now and then.

Arguments: the descriptor of its socket, the descriptor of the shared page, and the number of questions.
"""

from __future__ import annotations

import os
import socket
import sys

from trio_accel.devices.wire._channel import Channel
from trio_accel.devices.wire._protocol import SharedFrame, SharedPage


def answer(sock: socket.socket, seen: SharedFrame, count: int) -> None:
    """Answer this many questions; after some of them it sleeps until the socket has something to read."""
    channel = Channel(sock)
    channel._inbox.seen = seen
    answered = 0
    while answered < count:
        received = channel._take(0.0)
        patience = 50 if answered % 7 else 0
        while not received and patience:
            received = channel._take(0.0)
            patience -= 1
        received = received or channel._doze()
        while not received:
            sock.setblocking(True)
            sock.recv(1, socket.MSG_PEEK)
            sock.setblocking(False)
            received = channel._inbox.read(sock)
        for message, _ in received:
            if message != ("ask", answered):
                sys.exit(f"{message} instead of {answered}")
            sock.send(b"%015d\n" % answered)
            answered += 1


if __name__ == "__main__":
    page = SharedPage(os.dup(int(sys.argv[2])))
    answer(socket.socket(fileno=int(sys.argv[1])), page.frames[0], int(sys.argv[3]))
