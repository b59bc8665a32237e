"""The store of a generation, on a socket that was bound before."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import pytest
import torch.distributed as dist

from phalanx.worker import store_host


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def talk(store, port):
    """Have a worker's kind of client talk to it."""
    client = dist.TCPStore(
        "127.0.0.1", port, None, is_master=False, timeout=timedelta(seconds=20)
    )  # fmt: skip
    client.set("key", "value")
    assert client.add("count", 2) == 2
    assert store.get("key") == b"value"
    assert client.compare_set("key", "value", "other") == b"other"
    assert client.check(["key"])
    assert client.delete_key("key")
    client.wait(["count"])


def test_where_libuv_takes_no_socket_the_older_server_serves(listener, monkeypatch, capfd):
    """As in torch 2.6, which prints advice of its own before it raises."""
    real = dist.TCPStore
    tried = []

    def refuse_libuv(*args, use_libuv=True, **options):
        tried.append(use_libuv)
        if use_libuv:
            os.write(2, b"Please switch to the legacy TCPStore")
            raise NotImplementedError("no listen fd")
        return real(*args, use_libuv=use_libuv, **options)

    monkeypatch.setattr(dist, "TCPStore", refuse_libuv)
    port = listener.getsockname()[1]
    store = store_host.open_store(os.dup(listener.fileno()), "127.0.0.1", port)
    monkeypatch.undo()
    talk(store, port)
    assert tried == [True, False]
    assert capfd.readouterr().err == ""


def test_what_else_goes_wrong_is_heard(listener, monkeypatch, capfd):
    def fail(*args, **options):
        os.write(2, b"last words")
        raise RuntimeError("broken")

    monkeypatch.setattr(dist, "TCPStore", fail)
    with pytest.raises(RuntimeError, match="broken"):
        store_host.open_store(listener.fileno(), "127.0.0.1", listener.getsockname()[1])
    assert capfd.readouterr().err == "last words"


def test_the_usual_server(listener):
    port = listener.getsockname()[1]
    talk(store_host.open_store(os.dup(listener.fileno()), "127.0.0.1", port), port)
