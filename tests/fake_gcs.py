"""A server of Google Cloud Storage's JSON API, in memory, for tests: one bucket.

    python tests/fake_gcs.py BUCKET

prints its address and serves until its standard input ends. It has what gcsfs, Google's
client and tensorstore ask for: generations and conditions on them, ranges, lists by
prefix, uploads of three kinds, rewriting, batches of deletions.
"""

import email
import itertools
import json
import re
import sys
import threading
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

LOCK = threading.Lock()
OBJECTS: dict[str, tuple[int, bytes]] = {}  # name -> generation, content
UPLOADS: dict[str, tuple[str, bytearray]] = {}  # resumable: id -> name, so far
NUMBERS = itertools.count(1)


def parts_of(content_type: str, body: bytes) -> list[Message]:
    head = f"Content-Type: {content_type}\r\n\r\n".encode()
    return email.message_from_bytes(head + body).get_payload()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    bucket = ""

    def log_message(self, *args):
        pass

    def answer(self, status: int, body: bytes = b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer_json(self, value, status: int = 200, **headers):
        body = json.dumps(value).encode()
        self.answer(status, body, Content_Type="application/json", **headers)

    def fail(self, status: int):
        error = {"code": status, "message": f"{status}: {self.path}", "errors": []}
        self.answer_json({"error": error}, status)

    def described(self, name: str) -> dict[str, str]:
        generation, content = OBJECTS[name]
        return {
            "kind": "storage#object",
            "bucket": self.bucket,
            "name": name,
            "generation": str(generation),
            "metageneration": "1",
            "size": str(len(content)),
            "contentType": "application/octet-stream",
            "timeCreated": "2026-01-01T00:00:00.000Z",
            "updated": "2026-01-01T00:00:00.000Z",
        }

    def unmet(self, name: str) -> int:
        """The status of a condition on the generation that does not hold, or 0."""
        now = OBJECTS.get(name, (0, b""))[0]
        if int(self.query.get("ifGenerationMatch", now)) != now:
            return 412
        return 304 if int(self.query.get("ifGenerationNotMatch", -1)) == now else 0

    def put(self, name: str, content: bytes):
        if unmet := self.unmet(name):
            return self.fail(unmet)
        OBJECTS[name] = next(NUMBERS), bytes(content)
        return self.answer_json(self.described(name))

    def handle_all(self):
        url = urlsplit(self.path)
        self.query = {k: v[-1] for k, v in parse_qs(url.query).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        place = re.fullmatch(
            r"(/upload|/download)?/storage/v1/b/([^/]+)(?:/o(?:/([^/]+))?)?(/.*)?",
            url.path,
        )
        with LOCK:
            if url.path.startswith("/batch/"):
                return self.batch(body)
            if not place or unquote(place[2]) != self.bucket:
                return self.fail(404)
            name = unquote(place[3] or "")
            if place[1] == "/upload":
                return self.upload(body)
            if place[4]:
                verb, _, target = place[4].rpartition("/o/")
                return self.to_other(verb.split("/")[1], name, unquote(target))
            if name:
                return self.of_object(name)
            if url.path.endswith("/o"):
                return self.list()
            return self.answer_json({"kind": "storage#bucket", "name": self.bucket})

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_all

    def of_object(self, name: str):
        if self.command == "DELETE":
            if unmet := self.unmet(name):
                return self.fail(unmet)
            return self.answer(204) if OBJECTS.pop(name, None) else self.fail(404)
        if self.command not in ("GET", "HEAD"):
            return self.fail(400)
        if name not in OBJECTS:
            return self.fail(404)
        if unmet := self.unmet(name):
            return self.fail(unmet) if unmet == 412 else self.answer(304)
        if self.query.get("alt") != "media":
            return self.answer_json(self.described(name))
        generation, content = OBJECTS[name]
        asked = re.match(r"bytes=(\d+)-(\d*)$", self.headers.get("Range") or "")
        if not asked:
            return self.answer(200, content, x_goog_generation=generation)
        start, size = int(asked[1]), len(content)
        end = min(size, int(asked[2] or size) + 1)
        if start >= size:
            return self.fail(416)
        return self.answer(
            206,
            content[start:end],
            x_goog_generation=generation,
            Content_Range=f"bytes {start}-{end - 1}/{size}",
        )

    def list(self):
        prefix, delimiter = (self.query.get(k, "") for k in ("prefix", "delimiter"))
        names = sorted(
            name
            for name in OBJECTS
            if name.startswith(prefix)
            and name >= self.query.get("startOffset", "")
            and ("endOffset" not in self.query or name < self.query["endOffset"])
        )
        folders = set()
        if delimiter:
            for name in names:
                head, found, _ = name[len(prefix) :].partition(delimiter)
                if found:
                    folders.add(prefix + head + delimiter)
            names = [n for n in names if delimiter not in n[len(prefix) :]]
        self.answer_json(
            {
                "kind": "storage#objects",
                "items": [self.described(name) for name in names],
                "prefixes": sorted(folders),
            }
        )

    def upload(self, body: bytes):
        number = self.query.get("upload_id")
        if number:
            name, content = UPLOADS[number]
            content += body
            sent = re.match(r"bytes .*/(\d+)$", self.headers.get("Content-Range", ""))
            if sent and int(sent[1]) == len(content):
                return self.put(name, content)
            return self.answer(308, Range=f"bytes=0-{len(content) - 1}")
        kind, name = self.query["uploadType"], self.query.get("name")
        if kind == "multipart":
            described, data = parts_of(self.headers["Content-Type"], body)
            name = name or json.loads(described.get_payload(decode=True))["name"]
            return self.put(name, data.get_payload(decode=True))
        if kind == "media":
            return self.put(name, body)
        name = name or json.loads(body)["name"]
        number = str(next(NUMBERS))
        UPLOADS[number] = name, bytearray()
        return self.answer(
            200, Location=f"http://{self.headers['Host']}{self.path}&upload_id={number}"
        )

    def to_other(self, verb: str, source: str, target: str):
        if source not in OBJECTS:
            return self.fail(404)
        OBJECTS[target] = next(NUMBERS), OBJECTS[source][1]
        if verb == "rewriteTo":
            return self.answer_json({"done": True, "resource": self.described(target)})
        if verb != "moveTo":
            return self.fail(400)
        del OBJECTS[source]
        return self.answer_json(self.described(target))

    def batch(self, body: bytes):
        answers = []
        for part in parts_of(self.headers["Content-Type"], body):
            text = part.get_payload(decode=True).decode()
            name = unquote(re.search(r"/o/([^/?\s]+)", text)[1])
            status = "204 No Content" if OBJECTS.pop(name, None) else "404 Not Found"
            answers.append(
                "--batch\r\nContent-Type: application/http\r\nContent-ID: "
                f"<response-{part['Content-ID'].strip('<>')}>\r\n\r\n"
                f"HTTP/1.1 {status}\r\n\r\n"
            )
        body = "".join([*answers, "--batch--\r\n"]).encode()
        self.answer(200, body, Content_Type="multipart/mixed; boundary=batch")


class Server(ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        pass  # a client that has left


if __name__ == "__main__":
    Handler.bucket = sys.argv[1]
    server = Server(("127.0.0.1", 0), Handler)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()
