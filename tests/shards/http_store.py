"""A real HTTP server of a directory, on this machine, that fails as it is told."""

import http.server
import re
import threading
import time
from contextlib import contextmanager
from functools import partial

STALL = 1.5  # seconds; longer than the tests' time limit
PAGE = b'<!DOCTYPE html><html><a href="about.html">nothing here</a></html>\n'


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves files and ranges of them, and listings; counts requests; takes faults from the server's list."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def list_directory(self, path):
        if not self.server.lists:
            return self._refuse()
        return super().list_directory(path)

    def do_GET(self):
        self.server.requests.append(self.path)
        with self.server.lock:
            wanted = [entry for entry in self.server.faults if re.search(entry[0], self.path)]
            fault = wanted[0][1] if wanted else None
            if wanted and not wanted[0][2]:
                self.server.faults.remove(wanted[0])
        path = self.translate_path(self.path)
        if fault == "500":
            return self.send_error(500)
        if fault == "403":
            return self.send_error(403)
        if fault == "drop":
            return self._drop()
        try:
            with open(path, "rb") as file:
                raw = file.read()
        except IsADirectoryError:
            return super().do_GET()
        except OSError:
            return self._refuse()
        self._answer(raw, fault)

    def _refuse(self):
        if self.server.refusal != 200:
            return self.send_error(self.server.refusal)
        self._answer(PAGE, None)

    def _answer(self, raw, fault):
        match = self.server.ranges and re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        part = raw[int(match[1]) : int(match[2]) + 1] if match else raw
        if fault == "wrong":
            part = part[: len(part) // 2] + bytes([part[len(part) // 2] ^ 1]) + part[len(part) // 2 + 1 :]
        if fault == "short":  # a whole answer, of less
            part = part[:-2]
        self.send_response(206 if match else 200)
        self.send_header("Content-Length", len(part))
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

    def _drop(self):
        self.close_connection = True
        self.connection.close()


@contextmanager
def serving(directory, ranges=True, lists=True, refusal=404):
    """A running server; `url`, `requests` (paths, in order) and `faults`, a list of (pattern, fault, lasting).

    ranges, lists  whether it answers range requests, lists directories
    refusal        status for what is not there; 200 with a web page, as some servers have it
    """
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(directory)))
    server.ranges, server.lists, server.refusal = ranges, lists, refusal
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
