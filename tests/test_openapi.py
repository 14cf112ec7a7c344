"""The document of the interface: it names what there is, says what is taken, and a fuzzer finds nothing against it."""

import json
import shutil
import subprocess
import sys

import httpx
import pytest
import served

from jetspec_jax.serve import app, bodies, openapi
from jetspec_jax.serve.service import Limits, Service


def test_every_path_and_every_key_is_in_it():
    found = openapi.document("tiny")
    routes = {
        route.path.replace("{name:path}", "{name}") for route in app.make(Service("tiny", Limits()))._inner.routes
    }
    assert routes == {*found["paths"], "/"}  # the page is for people
    keys = lambda name: set(found["components"]["schemas"][name]["properties"])
    assert keys("Chat") == bodies.CHAT | set(bodies.HARMLESS)
    assert keys("Completion") == bodies.COMPLETION | set(bodies.HARMLESS)
    assert found["components"]["schemas"]["Chat"]["properties"]["temperature"]["anyOf"][0] == {
        "type": "number", "minimum": 0, "maximum": 1e30,
    }  # fmt: skip
    operations = [one for path in found["paths"].values() for one in path.values() if "operationId" in one]
    assert len({one["operationId"] for one in operations}) == len(operations)
    text = json.dumps(found)
    for name in ("Chat", "Completion", "Answer", "Part", "Error"):
        assert f"#/components/schemas/{name}" in text


@pytest.mark.slow
def test_a_fuzzer_finds_nothing_against_it():
    """Schemathesis, where it is installed: no answer is a server's error, another status, or of another shape."""
    st = shutil.which("st") or shutil.which("schemathesis") or pytest.skip("schemathesis is not installed")
    with served.running(Limits(waiting=256, body=1 << 16)) as server:
        checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
        command = [st, "run", f"{server.url}/openapi.json", "--checks", checks, "--max-examples", "60"]
        got = subprocess.run(command, capture_output=True, text=True, timeout=900)
        print(got.stdout, got.stderr, file=sys.stderr)
        assert got.returncode == 0
        assert httpx.get(server.url + "/health").json() == {"status": "ok"} and server.quiet(60)
