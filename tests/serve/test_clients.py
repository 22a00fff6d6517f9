"""One client's share of the places, and what an upload that holds one has to keep up with."""

import contextlib
import http.client
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import serving
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from websockets.sync.client import connect

from sbkit.infer.engine import Engine
from sbkit.serve.clients import FairQueue, Shares, address
from sbkit.serve.errors import ApiError
from sbkit.serve.job import Cancelled, Job
from sbkit.serve.limits import Limits


@pytest.mark.parametrize("client, found", [
    (None, None), (("testclient", 1), None), (("127.0.0.1", 1), None), (("::1", 1), None),
    (("127.8.9.1", 1), "127.8.9.1"),
    (("::ffff:127.0.0.1", 1), None), (("192.0.2.7", 1), "192.0.2.7"), (("::ffff:192.0.2.7", 1), "192.0.2.7"),
    (("2001:db8:1:2:3:4:5:6", 1), "2001:db8:1:2::/64"), (("fe80::1%eth0", 1), "fe80::/64"),
])
def test_a_client_is_an_address_or_a_network_of_one_house_and_this_machine_is_nobody(client, found):
    assert address({"client": client}) == found


def test_a_client_has_its_share_and_gets_it_back():
    shares = Shares(10, 0.2)
    with shares.slot("a", "requests", 1), shares.slot("b", "requests", 1), shares.slot("a", "requests", 1):
        with refused("rate_limit_exceeded", kind=ApiError) as caught, shares.slot("a", "requests", 1):
            pass
        assert caught.value.status == 429 and caught.value.headers["retry-after"]
        with shares.slot(None, "requests", 1), shares.slot("b", "requests", 1):
            pass
    assert not shares.taken
    with Shares(1, 0.01).slot("a", "requests", 1):
        pass  # at least one


def test_places_are_given_in_turn_and_one_address_has_its_share_of_them():
    turns = FairQueue(4, 0.5)
    first = [turns.acquire("a") for _ in range(5)]
    assert [each.done() for each in first] == [True, True, False, False, False] and turns.ahead("a") == 1.5
    second = [turns.acquire("b") for _ in range(3)]
    assert [each.done() for each in second] == [True, True, False]
    turns.release("a")
    assert first[2].done() and not second[2].done(), "b has its share"
    assert first[3].cancel() and not first[2].cancel()
    turns.release("a")
    assert first[4].done()
    for client in ("a", "a", "b", "b"):
        turns.release(client)
    assert second[2].done()
    turns.release("b")
    assert [turns.acquire(None).done() for _ in range(5)] == [True] * 4 + [False], "a local proxy may have all"


def test_who_left_is_not_waited_for():
    turns = FairQueue(8, 1.0)
    for _ in range(8):
        turns.acquire("a")
    waiting = [turns.acquire("a") for _ in range(501)]
    for each in waiting[1:]:
        each.cancel()
    assert turns.ahead("a") == 1 / 8
    turns.release("a")
    assert waiting[0].done() and turns.ahead("a") == 0


@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["wait", "cancel", "back"])), max_size=60))
def test_no_place_is_lost_or_given_twice_whoever_leaves(acts):
    turns, asked = FairQueue(3, 0.5), {client: [] for client in "abc"}
    for client, act in acts:
        if act == "wait":
            asked[client].append(turns.acquire(client))
        elif asked[client] and not asked[client].pop(0).cancel():
            turns.release(client)
        held = {client: sum(each.done() for each in line) for client, line in asked.items()}
        assert sum(held.values()) <= 3 and max(held.values()) <= 2
        waits = [client for client, line in asked.items() if held[client] < len(line)]
        assert sum(held.values()) == 3 or all(held[client] == 2 for client in waits), "none is free while one waits"


def test_a_place_waited_for_in_a_thread_is_free_after_it_and_after_a_cancellation():
    turns, job = FairQueue(1, 1.0), Job("a")
    with turns.slot(Job("b")), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(contextlib.ExitStack().enter_context, turns.slot(job))
        serving.until(lambda: turns.ahead("a") == 1)
        job.cancel()
        with pytest.raises(Cancelled):
            waiting.result()
    with turns.slot(Job("a")):
        pass


def test_one_client_leaves_places_for_the_others(bundle):
    limits = Limits(decoders=1, max_requests=4, max_live=2)
    mallory, alice = {"x-forwarded-for": "192.0.2.1"}, {"x-forwarded-for": "203.0.113.9, 192.0.2.2"}
    with serving.serving(bundle, limits=limits, proxies=("127.0.0.1",)) as server:
        with server.busy("a", "b", headers=mallory) as go, ThreadPoolExecutor(1) as pool:
            answer = server.post("c", headers=mallory)
            assert answer.status_code == 429 and "your address" in answer.json()["error"]["message"]
            other = pool.submit(server.post, "c", headers=alice)
            serving.until(lambda: server.counted("sbkit_requests_inside") == 3)
            go.set()
            assert other.result().json()["text"] == "c"
        with connect(server.live, additional_headers=mallory):
            assert serving.refused_socket(server.live, additional_headers=mallory).status_code == 429
            with connect(server.live, additional_headers=alice):
                pass


def test_nobodys_word_on_who_asks_is_taken_unless_it_is_a_proxys(bundle):
    """Else who writes another address into each request has no bound, and could use up somebody else's share."""
    limits = Limits(decoders=1, max_requests=2, client_share=0.1)
    with serving.serving(bundle, limits=limits) as server, \
            server.busy("a", "b", headers={"x-forwarded-for": "192.0.2.1"}):
        pass


@pytest.mark.slow
def test_an_upload_that_comes_too_slowly_loses_its_place_and_a_slow_one_does_not(bundle):
    limits = Limits(decoders=1, min_upload_kbs=8, upload_grace_seconds=1.0)
    with serving.serving(bundle, limits=limits) as server:
        request = httpx.Request("POST", server.url, data={"model": "level"},
                                files={"file": ("a.wav", serving.wav("slow " * 10))})
        body, answers = request.read(), []

        def slow():
            client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
            pieces = (body[i : i + 4096] for i in range(0, len(body), 4096))
            client.request("POST", "/v1/audio/transcriptions",
                           (time.sleep(0.05) or piece for piece in pieces), dict(request.headers))
            answers.append(json.load(client.getresponse()))

        good = threading.Thread(target=slow)
        good.start()
        gone = threading.Event()
        with serving.uploading(server, 1_000_000) as client:
            client.send(b"--x\r\n")

            def trickle():
                with contextlib.suppress(OSError):
                    while not gone.wait(0.05):
                        client.send(b"a")

            drops = threading.Thread(target=trickle)
            drops.start()
            answer = client.getresponse()
            assert answer.status == 408 and answer.getheader("connection") == "close"
            error = json.load(answer)["error"]
            assert error["code"] == "upload_too_slow" and "less than 8 KB a second" in error["message"]
            gone.set()
            drops.join()
        good.join()
        assert answers[0]["text"] == " ".join(["slow"] * 10)
        assert server.counted("sbkit_requests_inside") == 0 and server.state.disk.reserved == 0


@pytest.mark.slow
def test_who_can_not_begin_in_time_behind_the_others_of_its_address_is_refused_at_once(bundle):
    limits = Limits(decoders=1, max_requests=64, max_active=2, client_share=0.5, request_seconds=4)
    mallory, alice = {"x-forwarded-for": "192.0.2.1"}, {"x-forwarded-for": "192.0.2.2"}
    with serving.serving(bundle, limits=limits, proxies=("127.0.0.1",)) as server:
        for _ in range(2):  # the first round shows how long it takes
            with ThreadPoolExecutor(24) as pool, server.held():
                asked = [pool.submit(server.post, "a", headers=mallory) for _ in range(24)]
                answers = [each.result() for each in asked]
        late = [each for each in answers if each.status_code == 429]
        assert sum(each.elapsed.total_seconds() < 3 for each in late) > 12, "not after 4 s"
        assert "as can start within the time limit" in late[0].json()["error"]["message"]
        assert late[0].headers["retry-after"]
        assert server.post("b", headers=alice).json()["text"] == "b"
        assert server.post("b", headers=mallory).json()["text"] == "b", "none of its waits any more"


@pytest.mark.slow
def test_a_server_that_was_never_asked_refuses_at_once_what_it_can_not_hear_in_time(bundle, monkeypatch):
    real = Engine.submit

    def slow(engine, signals):
        time.sleep(sum(map(len, signals)) / engine.config.sample_rate / 10)
        return real(engine, signals)

    monkeypatch.setattr(Engine, "submit", slow)
    limits = Limits(decoders=1, max_active=2, request_seconds=8, client_share=1)
    with serving.serving(bundle, limits=limits, proxies=("127.0.0.1",)) as server, ThreadPoolExecutor(9) as pool:
        def ask(seconds, client):
            return server.post(serving.silence(seconds), headers={"x-forwarded-for": client})

        alone = ask(200, "192.0.2.2")
        assert alone.status_code == 504 and alone.elapsed.total_seconds() < 4
        burst = [each.result() for each in [pool.submit(ask, 50, "192.0.2.1") for _ in range(9)]]
    refused = [each for each in burst if each.status_code == 429]
    assert len(refused) == 8 and max(each.elapsed.total_seconds() for each in refused) < 6, "not after 8 s"
