"""The names that a server answers to: others are how a page elsewhere reaches into this machine (DNS rebinding)."""

import socket

import httpx
import pytest
import serving
from websockets.sync.client import connect

from sbkit.serve import server
from sbkit.serve.access import Hosts


@pytest.mark.parametrize("host, allowed", [
    ("localhost", True), ("localhost:8000", True), ("LOCALHOST.:80", True), ("127.0.0.1:1", True), ("[::1]", True),
    ("[::1]:8000", True), (None, True), ("speech.lan:8000", True), ("evil.example", False), ("", False),
    ("127.0.0.1.evil.example", False), ("localhost@evil.example", False), ("evil.example:localhost", False),
    ("127.0.0.2", False), ("[::2]:80", False), ("localhost:80:80", False), ("::1", False),
])
def test_on_this_machines_address_only_its_own_names_and_those_allowed(host, allowed):
    assert Hosts("127.0.0.1", ["Speech.lan"]).allow(host) is allowed


def test_on_other_addresses_with_a_key_every_name_unless_names_are_given():
    assert all(Hosts(each, keyed=True).allow("anything.example") for each in ("0.0.0.0", "::"))
    given = Hosts("192.0.2.1", ["speech.example"])
    assert given.allow("speech.example:80") and given.allow("192.0.2.1:80") and not given.allow("evil.example")
    assert Hosts("::1").allow("[::1]:80") and not Hosts("::1").allow("evil.example")
    assert Hosts("127.0.0.2").allow("127.0.0.2:80")


@pytest.mark.parametrize("host, allowed", [
    ("evil.example", False), ("evil.example:8000", False), ("192.0.2.1.evil.example:80", False), ("", False),
    ("a.192.0.2.1", False), ("evil.local", False), ("[evil.example]", False), ("evil.example.", False),
    ("192.0.2.7:8000", True), ("[2001:db8::1]:80", True), ("localhost:1", True), ("sbkit:8000", True), (None, True),
    (socket.gethostname(), True), (f"{socket.gethostname()}.local:80", True)])
@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.0.2.1"])
def test_on_other_addresses_without_a_key_no_name_that_others_can_define(address, host, allowed):
    """A page of evil.example whose name then leads here has this server's own origin: only the name tells."""
    assert Hosts(address).allow(host) is allowed


@pytest.mark.parametrize("called", ["LOCALHOST", "127.1", "0x7f000001"])
def test_however_this_machines_address_is_called_it_is_one(called):
    with server.bind(called, 0) as listening:
        hosts = Hosts(listening.getsockname()[0], listened_on=called)
    assert hosts.allow("localhost:80") and hosts.allow(called) and not hosts.allow("evil.example")


def test_each_request_is_a_line_without_key_path_of_its_own_or_text(bundle, caplog):
    caplog.set_level("INFO", "sbkit.serve.access")
    with serving.serving(bundle, keys=["secret-key"]) as server:
        keyed = {"authorization": "Bearer secret-key"}
        for path, headers in (("/health", {}), ("/v1/models", {}), ("/v1/models", keyed), ("/a-private-path", keyed),
                              ("/v1/audio/corrections/a-private-name", keyed)):
            httpx.get(server.url + path, headers=headers)
        said = httpx.post(f"{server.url}/v1/audio/transcriptions", headers=keyed, data={"model": "level"},
                          files={"file": ("private-name.wav", serving.wav("first words"))})
        assert said.json()["text"] == "first words"
    assert [each.split(" after ")[0] for each in caplog.messages] == [
        "127.0.0.1 GET /v1/models: 401", "127.0.0.1 GET /v1/models: 200", "127.0.0.1 GET other: 404",
        "127.0.0.1 GET /v1/audio/corrections: 405", "127.0.0.1 POST /v1/audio/transcriptions: 200"]
    assert said.headers["x-request-id"] in caplog.messages[-1]
    assert not any(word in line for line in caplog.messages for word in ("secret", "private", "first"))


def test_a_wrong_name_is_refused_on_every_path_and_by_the_socket(bundle):
    with serving.serving(bundle, hosts=Hosts("127.0.0.1")) as server:
        for path in ("/", "/health", "/v1/models", "/metrics", "/v1/audio/live"):
            answer = httpx.get(server.url + path, headers={"host": f"evil.example:{server.port}"})
            assert answer.status_code == 421 and answer.json()["error"]["code"] == "host_not_allowed"
            assert "--allow-host" in answer.json()["error"]["message"]
        asking = socket.create_connection(("127.0.0.1", server.port))
        refused = serving.refused_socket(f"ws://evil.example:{server.port}/v1/audio/live", sock=asking)
        assert refused.status_code == 421
        for host in ("127.0.0.1", "localhost"):
            assert httpx.get(f"http://127.0.0.1:{server.port}/v1/models", headers={"host": host}).status_code == 200
        with connect(server.live):
            pass
