# SPDX-License-Identifier: Apache-2.0
"""The unit and the container file of docs/use/service.md: their commands start a server that ends in time."""

import configparser
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.serve.conftest import serve

PAGE = (Path(__file__).parents[2] / "docs" / "use" / "service.md").read_text()


def block(kind):
    return re.search(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)[1]


@pytest.fixture(scope="module")
def unit():
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str
    parser.read_string(block("ini"))
    return parser["Service"]


def test_units_command_serves_without_model_and_ends(unit, tmp_path):
    program, *arguments = shlex.split(unit["ExecStart"])
    assert program.endswith("/flownpu")
    assert arguments[0] == "serve"
    server = serve(*arguments[1:], XDG_CACHE_HOME=str(tmp_path))
    assert server.http().get("/v1/models").json() == {"object": "list", "data": []}
    refused = server.http().post("/v1/completions", json={"model": "x", "prompt": "y"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert server.end() == 0
    assert int(unit["TimeoutStopSec"]) > 30  # --stopping-seconds


def test_systemd_takes_unit(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed (Debian: apt install systemd)")
    text = block("ini").replace("%h/.venv/bin/flownpu", "/bin/true")
    (tmp_path / "flownpu.service").write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", tmp_path / "flownpu.service"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "flownpu.service" not in done.stderr, done.stderr


def test_containers_command_takes_key_or_hosts(topics):
    command = json.loads(re.search(r"ENTRYPOINT (\[.*\])", block("dockerfile"))[1])
    assert command[:2] == ["flownpu", "serve"]
    server = serve(*command[2:], topics, "--open-to-all", "--allowed-host", "flownpu")
    try:
        for host, status in (("flownpu:8080", 200), ("localhost", 200), ("evil.example", 400)):
            assert server.http(headers={"Host": host}).get("/v1/models").status_code == status
    finally:
        server.end()
    key = serve(*command[2:], topics, FLOWNPU_API_KEY="k")
    try:
        for headers, status in (({}, 401), ({"X-Api-Key": "k"}, 200), ({"Authorization": "Bearer k"}, 200)):
            assert key.http(headers=headers).get("/v1/models").status_code == status
    finally:
        key.end()
