"""Files over HTTP: from a real nginx, and from servers that lie, break off or are away for a while."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import socket
import threading
import time
from pathlib import Path

import pytest

from partwise.deployment.certificates import make_certificates
from partwise.deployment.files import name_of, open_place
from partwise.deployment.http_files import GoneError, HttpFiles
from partwise.deployment.http_link import UnreachableError
from partwise.deployment.ranges import Piece
from partwise.types import UserError

DATA = bytes(range(256)) * 8
NAME = name_of(DATA, "safetensors")


@pytest.fixture
def folder(tmp_path):
    open_place(tmp_path / "files").put(DATA, "safetensors")
    return tmp_path / "files"


def requests_of(folder, count: int) -> list[str]:
    """The requests that nginx has logged, once there are so many. It logs one after it has answered."""
    logged = lambda: Path(f"{folder}.log").read_text().splitlines()
    end = time.monotonic() + 120
    while len(logged()) < count and time.monotonic() < end:
        time.sleep(0.01)
    return logged()


def ok(data: bytes, *headers: str, status: int = 200) -> bytes:
    """An answer as it goes over the wire."""
    lines = [f"HTTP/1.1 {status} Word", f"Content-Length: {len(data)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + data


@pytest.fixture
def crooked():
    """A function that starts a server which gives these answers, one after the other, the last one for ever.
    Returns its files and the headers of the requests."""
    running = []

    def start(*answers: bytes, patience: float = 20.0):
        asked = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                asked.append(dict(self.headers))
                self.wfile.write(answers[min(len(asked), len(answers)) - 1])
                self.close_connection = True

            def log_message(self, *_):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        files = HttpFiles(f"http://127.0.0.1:{server.server_port}", patience=patience)
        running.extend([(server.shutdown, server.server_close, files.close)])
        return files, asked

    yield start
    for ends in running:
        for end in ends:
            end()


def test_many_files_over_few_connections(tmp_path, nginx):
    place = open_place(tmp_path / "files")
    data = [b"%d" % number * 50 for number in range(300)]
    names = place.put_many(data, "index")
    files = HttpFiles(nginx(tmp_path / "files"), connections=4)
    assert files.get_many(dict.fromkeys(names, 200)) == dict(zip(names, data, strict=True))
    assert files.get_many({}) == {}
    assert files.received == sum(map(len, data))
    assert len(requests_of(tmp_path / "files", 300)) == 300
    files.close()


def test_an_address_of_something_else(folder, nginx):
    with pytest.raises(UserError, match="no name of a file"):
        HttpFiles(nginx(folder)).get_many({"../secret": 10})


@pytest.mark.parametrize("bad", [DATA[:-1], b"", DATA[:100] + b"\0" + DATA[101:], b"of another run"])
def test_a_file_with_other_bytes_is_named_after_three_tries(folder, nginx, bad):
    (folder / NAME).write_bytes(bad)
    with pytest.raises(UserError, match=rf"{NAME}' came 3 times with other bytes"):
        HttpFiles(nginx(folder)).get_many({NAME: 5000})
    assert len(requests_of(folder, 3)) == 3


def test_a_file_that_is_gone(folder, nginx):
    gone = name_of(b"gone", "json")
    with pytest.raises(GoneError, match=rf"{gone}' is not there: its manifest is stale"):
        HttpFiles(nginx(folder)).get_many({NAME: 5000, gone: 10})
    assert len(requests_of(folder, 1)) <= 2


def test_a_file_that_is_larger_than_it_may_be(folder, nginx, crooked):
    files = HttpFiles(nginx(folder))
    with pytest.raises(UserError, match=r"has 2,048 bytes, and may have 2,047 at most"):
        files.get_many({NAME: 2047})
    assert files.get_many({NAME: 2048}) == {NAME: DATA}
    chunk = b"400\r\n" + b"x" * 1024 + b"\r\n"
    endless = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk * 1000
    with pytest.raises(UserError, match=r"has more than 2,048 bytes"):
        crooked(endless)[0].get_many({NAME: 2048})


def test_more_bytes_than_announced_are_not_taken(crooked):
    files, asked = crooked(ok(DATA) + b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nbad")
    assert files.get_many({NAME: 5000}) == {NAME: DATA}
    assert files.get_many({NAME: 5000}) == {NAME: DATA}
    assert len(asked) == 2


@pytest.mark.parametrize(
    "first",
    [
        ok(b"", status=503),
        ok(b"", status=429),
        ok(b"", status=502),
        ok(DATA)[:-20],  # breaks off
        ok(DATA)[:10],
        b"",
        b"what?\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_may_be_better_the_next_time(crooked, first):
    files, asked = crooked(first, first, ok(DATA))
    assert files.get_many({NAME: 5000}) == {NAME: DATA}
    assert len(asked) == 3
    assert {each["Accept-Encoding"] for each in asked} == {"identity"}


def test_a_damaged_answer_is_asked_for_past_the_caches(crooked):
    files, asked = crooked(ok(b"x" + DATA[1:]), ok(DATA))
    assert files.get_many({NAME: 5000}) == {NAME: DATA}
    assert [each.get("Cache-Control") for each in asked] == [None, "no-cache"]


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (ok(gzip.compress(DATA), "Content-Encoding: gzip"), "came as gzip: turn compression off"),
        (ok(b"", "Location: http://127.0.0.1:1/", status=302), "must have status 200, and has 302"),
        (ok(b"", status=403), "must have status 200, and has 403"),
        (ok(DATA, status=206), "must have status 200, and has 206"),
        (ok(b"", status=204), "must have status 200, and has 204"),
    ],
)
def test_what_is_refused_at_once(crooked, answer, what):
    files, asked = crooked(answer)
    with pytest.raises(UserError, match=what):
        files.get_many({NAME: 5000})
    assert len(asked) == 1


def test_a_server_that_compresses_is_asked_not_to(folder, nginx):
    url = nginx(folder, "gzip on; gzip_types *; gzip_min_length 1;")
    assert HttpFiles(url).get_many({NAME: 5000}) == {NAME: DATA}


def test_a_server_that_is_away_for_a_while(folder, nginx, unused_port):
    files = HttpFiles(f"http://127.0.0.1:{unused_port}", patience=60)
    timer = threading.Timer(1.0, nginx, [folder], {"port": unused_port})
    timer.start()
    assert files.get_many({NAME: 5000}) == {NAME: DATA}
    timer.join()


def test_a_server_that_stays_away(unused_port, crooked):
    with pytest.raises(UnreachableError, match=rf"{NAME}' could not be had"):
        HttpFiles(f"http://127.0.0.1:{unused_port}", patience=0.3).get_many({NAME: 5000})
    with pytest.raises(UnreachableError, match=r"could not be had: status 503"):
        crooked(ok(b"", status=503), patience=2)[0].get_many({NAME: 10, name_of(b"", "json"): 10})


@pytest.mark.parametrize("pause", [0.02, 30.0])
def test_a_server_that_drips(pause):
    """A byte now and then, or none: the caller's patience ends it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ended = threading.Event()

        def drip():
            connection, _ = listener.accept()
            answer = ok(DATA)
            for place in range(60, len(answer)):
                with contextlib.suppress(OSError):
                    connection.sendall(answer[:60] if place == 60 else answer[place : place + 1])
                if ended.wait(pause):
                    return

        thread = threading.Thread(target=drip)
        thread.start()
        files = HttpFiles(f"http://127.0.0.1:{listener.getsockname()[1]}", patience=0.5)
        with pytest.raises(UnreachableError, match="could not be had"):
            files.get_many({NAME: 5000})
        ended.set()
        thread.join()


# Ranges


def test_pieces_of_a_file(folder, nginx):
    files = HttpFiles(nginx(folder))
    pieces = [Piece(0, 1), Piece(100, 300), Piece(2000, 5000)]
    assert files.get_ranges(NAME, pieces) == ([DATA[:1], DATA[100:300], DATA[2000:]], 2048)
    assert files.get_ranges(NAME, []) == ([], 0)
    assert [line.split()[2] for line in requests_of(folder, 3)] == ["206"] * 3


def test_a_server_that_ignores_ranges(folder, nginx):
    with pytest.raises(UserError, match=r"must have status 206, and has 200 \(it ignores Range"):
        HttpFiles(nginx(folder, "max_ranges 0;")).get_ranges(NAME, [Piece(0, 10)])


def test_a_piece_beyond_the_end(folder, nginx):
    with pytest.raises(UserError, match="must have status 206, and has 416"):
        HttpFiles(nginx(folder)).get_ranges(NAME, [Piece(2048, 2050)])
    with pytest.raises(GoneError):
        HttpFiles(nginx(folder)).get_ranges(name_of(b"", "json"), [Piece(0, 2)])


@pytest.mark.parametrize(
    "said", ["bytes 0-9/2048", "bytes 10-19", "bytes 10-19/*", "10-19/-5", "bytes 10-18/2048"]
)
def test_another_piece_than_was_asked_for(crooked, said):
    files, _ = crooked(ok(DATA[10:20], f"Content-Range: {said}", status=206))
    with pytest.raises(UserError, match="bytes 10-19 were asked for, and the answer says"):
        files.get_ranges(NAME, [Piece(10, 20)])


def test_a_piece_that_is_short_or_long(crooked):
    said = "Content-Range: bytes 10-19/2048"
    files, asked = crooked(ok(DATA[10:15], said, status=206), ok(DATA[10:20], said, status=206))
    assert files.get_ranges(NAME, [Piece(10, 20)]) == ([DATA[10:20]], 2048)
    assert len(asked) == 2
    with pytest.raises(UserError, match="may have 10 at most"):
        crooked(ok(DATA, said, status=206))[0].get_ranges(NAME, [Piece(10, 20)])


def test_over_tls(folder, nginx, unused_port, tmp_path):
    made = make_certificates(tmp_path)
    tls = (
        f"listen 127.0.0.1:{unused_port} ssl; ssl_certificate {made.server}; ssl_certificate_key {made.key};"
    )
    nginx(folder, tls)
    url = f"https://127.0.0.1:{unused_port}"
    assert HttpFiles(url, authority=made.authority).get_many({NAME: 5000}) == {NAME: DATA}
    with pytest.raises(UnreachableError, match="CERTIFICATE_VERIFY_FAILED"):
        HttpFiles(url, patience=3).get_many({NAME: 5000})
