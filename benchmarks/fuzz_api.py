"""schemathesis over the server's own OpenAPI document: whatever is sent, no status of 500 or above.

python benchmarks/fuzz_api.py SCHEMATHESIS [--examples 60] [--seed 1] [--model debug-tiny]
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import httpx
from served_process import served

SERVER = ("--default-max-tokens", "16", "--log-format", "none", "--request-timeout", "60")


def with_model(document, url):
    """The document with the model's name, which random text would never be."""
    names = [one["id"] for one in httpx.get(f"{url}/v1/models").json()["data"]]
    schemas = document["components"]["schemas"].values()
    asking = [one for one in schemas if "model" in one.get("properties", ())]
    if not asking:
        raise SystemExit("no request of the document has a field `model`")
    for one in asking:
        one["properties"]["model"] = {"type": "string", "enum": names}
    return document


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schemathesis", help="its command, which may be of another environment")
    parser.add_argument("--examples", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default="debug-tiny")
    given = parser.parse_args()
    with served(given.model, *SERVER) as (_, url), tempfile.TemporaryDirectory() as folder:
        document = Path(folder) / "openapi.json"
        document.write_text(json.dumps(with_model(httpx.get(f"{url}/openapi.json").json(), url)))
        done = subprocess.run(
            [given.schemathesis, "run", document, "--url", url, "--checks", "not_a_server_error",
             "--max-examples", str(given.examples), "--seed", str(given.seed), "--workers", "2",
             "--suppress-health-check", "all", "--continue-on-failure",
             "--request-timeout", "60", "--generation-database", "none"],
            check=False,
        )  # fmt: skip
    raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
