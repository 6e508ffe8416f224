"""Laws of hub ids, on a hub that the tests serve."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_checkpoints import TINY

from headrace.export.build import ExportOptions, export
from headrace.models.families import config_from_hf, weights
from headrace.models.manifest import Bundle

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


class Hub(BaseHTTPRequestHandler):
    """The few routes of a hub that a download asks for, over one folder; `gated/*` is refused."""

    folder: Path
    commit = "0123456789abcdef0123456789abcdef01234567"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/tiny/revision/main"):
            names = [{"rfilename": file.name} for file in self.folder.iterdir()]
            self.reply(200, json.dumps({"id": "org/tiny", "sha": self.commit, "siblings": names}))
        elif path.startswith("/api/models/org/tiny/tree/"):
            files = [
                {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": self.etag(f)}
                for f in self.folder.iterdir()
            ]
            self.reply(200, json.dumps(files))
        elif path.startswith("/api/models/org/tiny/revision/"):
            self.reply(404, "", {"X-Error-Code": "RevisionNotFound"})
        elif path.startswith("/api/models/gated/"):
            self.reply(403, "", {"X-Error-Code": "GatedRepo"})
        elif path.startswith("/org/tiny/resolve/"):
            file = self.folder / path.rpartition("/")[2]
            headers = {"ETag": f'"{self.etag(file)}"', "X-Repo-Commit": self.commit}
            self.reply(200, file.read_bytes(), headers)
        else:
            self.reply(404, "", {"X-Error-Code": "RepoNotFound"})

    @staticmethod
    def etag(file: Path) -> str:
        return sha256(file.read_bytes()).hexdigest()[:40]

    def reply(self, code: int, body: str | bytes, headers: dict[str, str] | None = None) -> None:
        data = body.encode() if isinstance(body, str) else body
        self.send_response(code)
        for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    Hub.folder = tmp_path / "served"
    Hub.folder.mkdir()
    (Hub.folder / "config.json").write_text(json.dumps(CONFIG))
    (Hub.folder / "README.md").write_text("not wanted")
    table = weights(config_from_hf(CONFIG))
    tensors = {name: np.ones(shape, np.float32) for name, shape in table.items()}
    save_file(tensors, Hub.folder / "model.safetensors")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


READ = """
import sys
from headrace.errors import HeadraceError
from headrace.export.checkpoint import open_checkpoint
for source in sys.argv[1:]:
    try:
        checkpoint = open_checkpoint(source)
        print(checkpoint.name, len(checkpoint.names()), *sorted(f.name for f in checkpoint.files()))
    except HeadraceError as error:
        print(f"{type(error).__name__}: {error}")
"""


def from_hub(tmp_path: Path, *sources: str, **environment: str) -> list[str]:
    """What another process prints: the hub's client reads its environment once, on import."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    home = {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", READ, *sources],
        env={**kept, **home, **environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_hub_ids(tmp_path: Path, hub: str) -> None:
    sources = ("org/tiny", "org/tiny@main", "org/tiny@other", "org/none", "gated/tiny")
    lines = from_hub(tmp_path, *sources, HF_ENDPOINT=hub)
    files = "config.json model.safetensors"
    assert lines[0].split() == ["org/tiny", "21", *sorted(files.split())]
    assert lines[1].split()[0] == "org/tiny@main"
    assert "SourceError: org/tiny@other:" in lines[2]
    assert "no revision other" in lines[2]
    assert "SourceError: org/none:" in lines[3]
    assert "no such model" in lines[3]
    assert "gated" in lines[4].removeprefix("SourceError: gated/tiny:")
    # the cache answers when the hub is away, and a model that is not in it is one line
    offline = from_hub(tmp_path, "org/tiny", "org/none", HF_HUB_OFFLINE="1", HF_ENDPOINT=hub)
    assert offline[0] == lines[0]
    assert "SourceError: org/none: not in the hub's cache" in offline[1]


def test_hub_that_cannot_be_reached(tmp_path: Path) -> None:
    (line,) = from_hub(tmp_path, "org/tiny", HF_ENDPOINT="http://127.0.0.1:9")
    assert line.startswith("SourceError: org/tiny:")


def test_a_hub_id_is_exported(tmp_path: Path) -> None:
    """All the way: a tiny model on a hub becomes a bundle."""
    Hub.folder = TINY / "llama"
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        environment = {
            **os.environ,
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
        }
        command = [sys.executable, "-m", "headrace", "export", "org/tiny", "-o"]
        subprocess.run(
            [*command, str(tmp_path / "b"), "--quant", "f32"],
            env=environment,
            check=True,
            capture_output=True,
            timeout=120,
        )
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    hub_made = Bundle.open(tmp_path / "b").manifest
    export(str(TINY / "llama"), tmp_path / "local", ExportOptions(quant="f32"))
    local = Bundle.open(tmp_path / "local").manifest
    assert hub_made.files == local.files
    assert hub_made.name == "org/tiny"
