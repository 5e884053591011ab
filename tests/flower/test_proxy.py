"""The proxy in front of a server, examples/deploy/Caddyfile: requests of sites pass, and no other requests do."""

import http.client
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

FILES = Path(__file__).parents[2] / "examples" / "deploy"
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
CONTROL = "/v1/control/register-node"
FLEET = "/v1/fleet/pull-messages"
OUTSIDE = "127.0.0.2"

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not all(shutil.which(program, path=PATH) for program in ("caddy", "openssl")),
    reason="needs Linux for a second address, caddy and openssl",
)


class Behind(BaseHTTPRequestHandler):
    """A server that grants and remembers everything."""

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append((self.command, self.path, self.headers["Host"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST

    def log_message(self, *words):
        """Stay silent."""


@pytest.fixture(scope="module")
def proxy(tmp_path_factory):
    """A way to ask the proxy from another address, and the requests that have come through."""
    folder = tmp_path_factory.mktemp("proxy")
    subprocess.run(["sh", FILES / "certificates.sh", OUTSIDE], cwd=folder, check=True, capture_output=True)
    behind = ThreadingHTTPServer(("127.0.0.1", 0), Behind)
    behind.asked = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    behind.socket = context.wrap_socket(behind.socket, server_side=True)
    threading.Thread(target=behind.serve_forever, daemon=True).start()
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    text = (FILES / "Caddyfile").read_text()
    text = text.replace(":8443", f":{port}").replace("127.0.0.1:8000", f"127.0.0.1:{behind.server_port}")
    (folder / "Caddyfile").write_text(text)
    trust = ssl.create_default_context(cafile=str(folder / "ca.pem"))

    def ask(target, method="POST", body=b"", host=OUTSIDE):
        link = http.client.HTTPSConnection(OUTSIDE, port, context=trust, timeout=60)
        link.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
        link.putheader("Host", host)
        link.putheader("Content-Length", str(len(body)))
        link.endheaders()
        # the answer may come before all is sent
        with suppress(OSError):
            link.send(body)
        status = link.getresponse().status
        link.close()
        return status

    command = [shutil.which("caddy", path=PATH), "run", "--config", "Caddyfile"]
    with (folder / "caddy.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stderr=log, env=os.environ | {"HOME": str(folder)})
    try:
        for _ in range(300):
            with socket.socket() as one:
                if one.connect_ex((OUTSIDE, port)) == 0:
                    break
            assert process.poll() is None, (folder / "caddy.log").read_text()
            time.sleep(0.1)
        yield ask, behind
    finally:
        process.terminate()
        process.wait()
        behind.shutdown()
        behind.server_close()


def test_requests_of_sites_pass(proxy):
    ask, behind = proxy
    behind.asked.clear()
    assert ask(FLEET, body=bytes(1000), host="server.example:8443") == 200
    # without the sender's name, of which the SuperLink would make an address
    assert behind.asked == [("POST", FLEET, f"127.0.0.1:{behind.server_port}")]


@pytest.mark.parametrize(
    "target",
    [
        CONTROL,
        f"/{CONTROL}",
        f"{CONTROL}/",
        f"https://127.0.0.1{CONTROL}",
        "/v1/fleet/../control/register-node",
        "/v1/fleet/%2e%2e/control/register-node",
        "/v1/fleet/..%2fcontrol/register-node",
        f"{CONTROL}/../../fleet/pull-messages",
        f"{CONTROL}%3f/../../fleet/pull-messages",
        f"{CONTROL}#/../../../v1/fleet/pull-messages",
        f"{FLEET}?{CONTROL}",
        f"{FLEET}/../../control/register-node",
        "/v1/runtime/acquire-task",
        "/v1/fleet/",
        "/openapi.json",
        "/",
    ],
)
def test_no_other_address_passes(proxy, target):
    ask, behind = proxy
    behind.asked.clear()
    assert ask(target) == 403
    assert not behind.asked


def test_no_other_method_name_or_size_passes(proxy):
    ask, behind = proxy
    behind.asked.clear()
    assert ask(FLEET, method="GET") == 403
    assert ask(FLEET, host=f"127.0.0.1{CONTROL}?") == 400
    assert not behind.asked
    # the SuperLink reads a request whole before it looks whose it is
    assert ask(FLEET, body=bytes(64_000_001)) == 413
