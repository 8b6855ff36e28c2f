"""A real HTTP server of a directory, on this machine, that fails as it is told."""

import base64
import gzip
import http.server
import os
import re
import threading
import time
from contextlib import contextmanager
from functools import cache, partial

HOSTILE = ("redirect to a file", "slow header", "bomb", "long", "endless", "a byte a time")
STATUSES = ("403", "500", "503")
STALL = 1.5  # seconds; longer than the tests' time limit
PAGE = b'<!DOCTYPE html><html><a href="about.html">nothing here</a></html>\n'


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves files and listings; counts requests; takes faults from the server's list."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def list_directory(self, path):
        if not self.server.lists:
            return self._refuse()
        return super().list_directory(path)

    def do_GET(self):
        self.server.requests.append(self.path)
        fault = self._fault()
        if self.server.user and self.headers.get("Authorization") != _basic(self.server.user):
            return self.send_error(401)
        path = self.translate_path(self.path)
        if fault in HOSTILE:
            return self._be_hostile(fault)
        if fault in STATUSES:
            return self.send_error(int(fault))
        if fault == "drop":
            return self._drop()
        if os.path.isdir(path):
            return super().do_GET()
        if not os.path.isfile(path):  # a link to /dev/zero would be read without end
            return self._refuse()
        with open(path, "rb") as file:
            raw = file.read()
        self._answer(raw, fault)

    def _fault(self):
        with self.server.lock:
            wanted = [entry for entry in self.server.faults if re.search(entry[0], self.path)]
            if wanted and not wanted[0][2]:
                self.server.faults.remove(wanted[0])
        return wanted[0][1] if wanted else None

    def _refuse(self):
        if self.server.refusal != 200:
            return self.send_error(self.server.refusal)
        self._answer(PAGE, None)

    def _answer(self, raw, fault):
        if fault == "other" and self.server.other is not None:  # changed while it is read
            raw = (self.server.other / self.path.lstrip("/")).read_bytes() if self._other_has() else raw[::-1]
        part = raw[1:] if fault == "shifted" else raw
        if fault == "too much":
            part = raw + bytes(4096)
        if fault == "wrong":
            part = part[: len(part) // 2] + bytes([part[len(part) // 2] ^ 1]) + part[len(part) // 2 + 1 :]
        if fault == "gzip":
            part = gzip.compress(raw, 1)
        if fault == "short":  # a whole answer, of less
            part = part[:-2]
        self.send_response(200)
        if fault in ("shifted", "other"):
            self.send_header("ETag", f'"{hash(part):x}"')
        self.send_header("Content-Length", len(part))
        if fault == "gzip":
            self.send_header("Content-Encoding", "gzip")
        if part is PAGE:
            self.send_header("Content-Type", "text/html")
        self.end_headers()
        sent = part[: len(part) // 2] if fault in ("truncate", "stall") else part
        self.wfile.write(sent)
        if fault == "stall":
            self.wfile.flush()
            time.sleep(STALL)
        if fault in ("truncate", "stall"):
            self._drop()

    def _other_has(self):
        return (self.server.other / self.path.lstrip("/")).is_file()

    def do_HEAD(self):
        if self.server.user and self.headers.get("Authorization") != _basic(self.server.user):
            return self.send_error(401)
        fault = self._fault()
        if fault in STATUSES:
            return self.send_error(int(fault))
        if fault == "drop":
            return self._drop()
        return super().do_HEAD()

    def _be_hostile(self, fault):
        """What no honest server does; it goes on until the reader has had enough."""
        start = "HTTP/1.1 200 OK\r\n"
        self.close_connection = True
        try:
            if fault == "redirect to a file":
                return self._send("HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n")
            if fault == "slow header":
                return self._drip(start + "X-Long: " + "x" * 7000)
            if fault == "bomb":  # a kilobyte of it is a megabyte
                bomb = _bomb()
                return self._send(f"{start}Content-Encoding: gzip\r\nContent-Length: {len(bomb)}\r\n\r\n", bomb)
            if fault == "long":  # announced
                self._send(f"{start}Content-Length: 1000000000000\r\n\r\n")
                return self._flood()
            self._send(f"{start}Transfer-Encoding: chunked\r\n\r\n")
            return self._drip("1\r\n{\r\n" * 1000) if fault == "a byte a time" else self._flood(chunked=True)
        except OSError:  # the reader has closed the connection
            self.server.gave_up.append(fault)

    def _send(self, *parts):
        for part in parts:
            self.connection.sendall(part if isinstance(part, bytes) else part.encode())

    def _drip(self, text):
        for character in re.findall(r"1\r\n\{\r\n|.|\n|\r", text):
            self._send(character)
            time.sleep(0.05)

    def _flood(self, chunked=False):
        block = bytes(1 << 20)
        for _ in range(20_000):
            self._send(*((f"{len(block):x}\r\n", block, "\r\n") if chunked else (block,)))
            self.server.sent += len(block)

    def _drop(self):
        self.close_connection = True
        self.connection.close()


@cache
def _bomb():
    return gzip.compress(bytes(100_000_000))


def _basic(user):
    return "Basic " + base64.b64encode(user.encode()).decode()


@contextmanager
def serving(directory, lists=True, refusal=404, user=None):
    """A running server; `url`, `requests` (paths, in order) and `faults`, a list of (pattern, fault, lasting).

    lists    whether it lists directories
    refusal  status for what is not there; 200 with a web page, as some servers have it
    user     name:password that it asks for
    """
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(directory)))
    server.lists, server.refusal = lists, refusal
    server.other = None
    server.user, server.gave_up, server.sent = user, [], 0
    server.requests, server.faults, server.lock = [], [], threading.Lock()
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.handle_error = lambda *_: None
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
