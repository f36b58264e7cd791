"""Servers, nginx and devices as processes of their own, with TLS and device keys: after the run, the model is the
plain backend's, bit for bit."""

from __future__ import annotations

import pytest
import urllib3

POOL = urllib3.PoolManager(timeout=120)

pytestmark = pytest.mark.slow

RATINGS = {"data.num_items": 20, "data.mean_examples": 12, "data.dim": 2}
POSTS = {"data.num_words": 60, "data.num_tags": 5, "data.mean_examples": 6, "data.words_per_example": 5}
SHOWN = {
    "fed_recon": ("planted", RATINGS),
    "fed_select": ("tags-planted", POSTS),
    "fed_sub_avg": ("tags-planted", POSTS),
}
DEVICES = 4
PROXY = """
listen 127.0.0.1:{port} ssl;
ssl_certificate {certificates.server};
ssl_certificate_key {certificates.key};
location ~ ^/(v1/|healthz) {{
    proxy_pass http://partwise;
    proxy_http_version 1.1;
    proxy_set_header Connection "";
    proxy_set_header Host $host;
    proxy_set_header X-Forwarded-Proto $scheme;
    access_log {folder}/upstream.log upstream;
}}
"""


def settings(algorithm, rounds, **more):
    small = {"data.num_clients": 30, "cohort.size": 5, "algorithm": algorithm, "rounds": rounds}
    return {**small, **SHOWN[algorithm][1], **{name.replace("__", "."): each for name, each in more.items()}}


@pytest.mark.parametrize("algorithm", SHOWN)
def test_one_server_on_sqlite(fleet, algorithm):
    run = fleet(SHOWN[algorithm][0], settings(algorithm, 20))
    server = run.serve("--until-end")
    run.finish(run.join(server.url, DEVICES))
    assert server.popen.wait(300) == 0
    records = run.check_plain()
    assert [each["attempt"] for each in records] == [0] * 20
    with pytest.raises(urllib3.exceptions.HTTPError):
        POOL.request("GET", f"{server.url}/healthz", retries=False)


def two_servers(run, nginx, port, *more):
    """Two server processes behind one nginx, at this port. Returns the URL that devices are given."""
    urls = [run.serve("--proxy", *more, tls=False).url for _ in range(2)]
    upstream = " ".join(f"server {url.removeprefix('http://')};" for url in urls)
    nginx(
        run.folder / "slices",
        PROXY.format(port=port, certificates=run.certificates, folder=run.folder),
        http=f"log_format upstream '$upstream_addr $request_method $uri $status'; "
        f"upstream partwise {{ {upstream} keepalive 16; }}",
    )
    return f"https://127.0.0.1:{port}"


def answers(run):
    """How many requests each server has answered well, by its address."""
    counts = {}
    for line in (run.folder / "upstream.log").read_text().splitlines():
        address, _, _, status = line.split()
        assert status in ("200", "409"), line
        counts[address] = counts.get(address, 0) + (status == "200")
    return counts


@pytest.mark.parametrize("algorithm", SHOWN)
def test_two_servers_on_postgresql_behind_nginx(fleet, algorithm, new_postgres, nginx, unused_port):
    run = fleet(SHOWN[algorithm][0], settings(algorithm, 20), new_postgres())
    url = two_servers(run, nginx, unused_port)
    run.finish(run.join(url, DEVICES))
    run.check_plain()
    assert len(answers(run)) == 2
    assert min(answers(run).values()) > 20


@pytest.mark.parametrize(("way", "algorithm"), [("broadcast", "fed_select"), ("pregenerated", "fed_recon")])
def test_slices_as_files_of_nginx(fleet, way, algorithm, new_postgres, nginx, unused_port):
    run = fleet(
        SHOWN[algorithm][0],
        settings(algorithm, 6, serving__way=way, deploy__page_rows=4),
        new_postgres(),
    )
    place, url = run.folder / "slices", f"https://127.0.0.1:{unused_port}"
    two_servers(run, nginx, unused_port, "--place", str(place), "--files", url)
    run.finish(run.join(url, DEVICES))
    run.check_plain()
    asked = (run.folder / "slices.log").read_text().splitlines()
    assert len(asked) > DEVICES
    assert {line.split()[2] for line in asked} == {"200"}
    assert not [line for line in (run.folder / "upstream.log").read_text().splitlines() if "slices" in line]
