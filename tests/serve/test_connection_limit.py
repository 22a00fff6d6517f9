"""More connections than there is room for: who asks for nothing gives way, the rest is told, and it is logged once."""

import contextlib
import errno
import json
import logging
import resource
import socket

import httpx
import pytest
import serving
from refusals import refused
from websockets.sync.client import connect

from sbkit.serve import connection_limit
from sbkit.serve.limits import Limits
from sbkit.serve.metrics import Metrics


def test_who_asks_for_nothing_gives_way_and_is_told_why(bundle, caplog):
    limits = Limits(decoders=1, max_connections=4)
    with serving.serving(bundle, limits=limits) as server, contextlib.ExitStack() as all_:
        caplog.set_level(logging.WARNING)
        silent = [all_.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
                  for _ in range(40)]
        for text in ("a", "b", "c"):
            assert httpx.get(f"{server.url}/health", timeout=20).status_code == 200
            assert server.post(text).json()["text"] == text
        said = silent[0].recv(10_000)
        head, _, body = said.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ") and b"connection: close" in head and b"retry-after" in head
        assert json.loads(body)["error"]["code"] == "too_many_connections"
        assert server.counted("sbkit_refused_total") >= 36
        told = [each for each in caplog.records if "connections are open" in each.getMessage()]
        assert len(told) == 1 and "4 connections" in told[0].getMessage()


def test_one_address_gives_way_to_itself_and_leaves_places_for_others(bundle):
    """Whatever it sends: here, upgrades whose live session waits for its first message."""
    def open_(source):
        return socket.create_connection(("127.0.0.1", server.port), timeout=20, source_address=(source, 0))

    limits = Limits(decoders=1, max_connections=8, max_live=100, client_share=0.5)
    with serving.serving(bundle, limits=limits) as server, contextlib.ExitStack() as all_:
        silent = [all_.enter_context(open_("127.0.0.3")) for _ in range(20)]
        assert silent[0].recv(100).startswith(b"HTTP/1.1 503 "), "it was the first, and idle"
        busy = [all_.enter_context(connect(server.live, source_address=("127.0.0.3", 0))) for _ in range(4)]
        assert len(busy) == 4
        with open_("127.0.0.3") as refused:
            assert refused.recv(100).startswith(b"HTTP/1.1 503 ")
        for source in ("127.0.0.1", "127.0.0.2"):
            assert serving.exchange(server.port, b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
                                    source).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("proxies", ["127.0.0.3", "127.0.0.0/24"])
def test_a_trusted_proxys_connections_have_no_share(bundle, proxies):
    limits = Limits(decoders=1, max_connections=8, max_live=100, client_share=0.25)
    with serving.serving(bundle, limits=limits, proxies=(proxies,)) as server, contextlib.ExitStack() as all_:
        for i in range(6):
            session = all_.enter_context(connect(server.live, source_address=("127.0.0.3", 0),
                                                 additional_headers={"x-forwarded-for": f"192.0.2.{i}"}))
            session.send(json.dumps({"type": "start", "model": "level", "sample_rate": 8000}))
            assert json.loads(session.recv())["type"] == "ready"


@pytest.mark.slow
def test_where_all_are_at_work_the_probes_are_answered_and_others_get_a_503(bundle):
    with serving.serving(bundle, limits=Limits(decoders=1, max_connections=2)) as server:
        with server.busy("a", "b"):
            for _ in range(30):
                assert httpx.get(f"{server.url}/health", timeout=20).status_code == 200
            answer = server.post("b")
            assert answer.status_code == 503 and answer.headers["retry-after"]
            assert answer.json()["error"]["code"] == "too_many_connections"
            assert serving.refused_socket(server.live).status_code == 503
        assert server.post("c").json()["text"] == "c"
        with connect(server.live):
            pass


@pytest.fixture
def files(monkeypatch):
    """Sets how many files this process may open, and gives the list of limits that it will set."""
    def allow(soft, hard):
        set_ = []
        monkeypatch.setattr(connection_limit.resource, "getrlimit", lambda what: (soft, hard))
        monkeypatch.setattr(connection_limit.resource, "setrlimit", lambda what, to: set_.append(to))
        return set_

    return allow


@pytest.mark.parametrize("soft, hard, most, backlog", [
    (200, 200, 41, 41), (1024, 1 << 20, 1024, 128), (1024, 1024, 756, 128), (resource.RLIM_INFINITY,) * 2 + (1024, 128),
    (256, resource.RLIM_INFINITY, 1024, 128),
])
def test_as_many_as_open_files_allow(files, soft, hard, most, backlog):
    set_ = files(soft, hard)
    assert connection_limit.connection_budget(Limits()) == (most, backlog)
    assert all(new > soft and old == hard for new, old in set_ if soft != hard)


def test_many_requests_need_no_more_files_than_there_are_connections(files):
    files(1024, 1024)
    assert connection_limit.connection_budget(Limits(max_requests=4096))[0] == 410


def test_too_few_files_are_told_at_the_start(files):
    files(99, 99)
    with refused("ulimit-too-low"):
        connection_limit.connection_budget(Limits())


def test_that_no_file_is_left_to_accept_with_is_said_once(caplog):
    """asyncio tells of it for each place in the queue, again and again."""
    told = []
    loop = type("Loop", (), {"default_exception_handler": lambda self, context: told.append(context)})()
    house = connection_limit.ConnectionLimit(4, 0.5, Metrics())
    for _ in range(1000):
        house.failed(loop, {"message": "socket.accept() out of system resource",
                            "exception": OSError(errno.EMFILE, "Too many open files")})
    assert [each.getMessage() for each in caplog.records] == [
        "a connection can't be accepted: Too many open files (ulimit -n)"] and not told
    house.failed(loop, {"message": "else", "exception": OSError(errno.EIO, "no")})
    assert len(told) == 1
