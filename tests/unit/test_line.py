"""Lines: what was said before a connection ended is heard, and then the end."""

from __future__ import annotations

import socket

import pytest

from terrazzo.members.line import Line, LineError


def test_the_last_words_are_heard_before_the_end() -> None:
    """They often arrive together, on a machine that is busy."""
    one, other = _pair()
    Line(one).say(["bye", "out of memory"])
    one.close()
    line = Line(other)
    assert line.hear() == [["bye", "out of memory"]]
    with pytest.raises(LineError, match="connection closed"):
        line.hear()
    line.close()


def test_the_last_words_are_heard_where_the_end_is_an_error() -> None:
    """Who leaves without having read all that was sent to it resets the connection."""
    one, other = _pair()
    line = Line(other)
    line.say(["beat", 7])
    while not one.recv(1, socket.MSG_PEEK):
        pass
    Line(one).say(["bye", ""])
    one.close()
    assert line.hear() == [["bye", ""]]
    with pytest.raises(OSError, match=r"closed|reset"):
        line.hear()
    line.close()


def _pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]
