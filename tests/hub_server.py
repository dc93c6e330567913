"""A server on this machine that speaks those paths of the Hugging Face Hub that its client uses. Repositories are in memory.

Revisions are commits (40 digits), and branches that name one. Large files come by the protocol of LFS, as safetensors do.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


class Hub(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.commits: dict[str, dict[str, dict[str, bytes]]] = {}  # repository -> commit -> files
        self.branches: dict[str, dict[str, str]] = {}
        self.large: dict[str, bytes] = {}
        self.asked: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def commit(self, name: str, files: dict[str, bytes], branch: str = "main") -> str:
        known, branches = self.commits.setdefault(name, {}), self.branches.setdefault(name, {})
        files = {**known.get(branches.get(branch, branches.get("main", "")), {}), **files}
        oid = hashlib.sha1(b"".join([*(k.encode() + v for k, v in sorted(files.items())), b"%d" % len(known)])).hexdigest()
        known[oid], branches[branch] = files, oid
        return oid

    def files(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        oid = self.branches.get(name, {}).get(revision, revision)
        files = self.commits.get(name, {}).get(oid)
        return None if files is None else (oid, files)


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, body: Any = b"", status: int = 200, **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def missing(self, code: str) -> None:
        self.answer({"error": code}, 404, X_Error_Code=code)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def handle_one(self) -> None:
        raw = self.body()
        self.server.asked.append(f"{self.command} {self.path}")
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self.api("/".join(parts[2:4]), parts[4:], raw)
        elif parts == ["api", "repos", "create"]:
            told = json.loads(raw)
            name = f"{told.get('organization') or 'me'}/{told['name']}"
            if name not in self.server.commits:
                self.server.commit(name, {})
            self.answer({"url": f"{self.server.address}/{name}", "name": name})
        elif parts == ["api", "validate-yaml"]:
            self.answer({"errors": [], "warnings": []})
        elif parts[2:4] == ["info", "lfs"]:
            told = json.loads(raw)
            place = f"{self.server.address}/large/"
            objects = [{**each, "actions": {"upload": {"href": place + each["oid"]}}} for each in told["objects"]]
            self.answer({"transfer": "basic", "objects": objects})
        elif parts[0] == "large":
            self.server.large[parts[1]] = raw
            self.answer()
        elif "resolve" in parts:
            self.file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self.missing("NotServed")

    do_GET = do_HEAD = do_POST = do_PUT = handle_one

    def api(self, name: str, rest: list[str], raw: bytes) -> None:
        hub = self.server
        if name not in hub.commits:
            return self.missing("RepoNotFound")
        if rest[:1] == ["branch"]:
            hub.branches[name].setdefault(rest[1], hub.branches[name]["main"])
            return self.answer()
        revision = rest[1] if len(rest) > 1 else "main"
        found = hub.files(name, revision)
        if found is None:
            return self.missing("RevisionNotFound")
        oid, files = found
        if rest[:1] == ["preupload"]:
            asked = [each["path"] for each in json.loads(raw)["files"]]
            way = {True: "lfs", False: "regular"}
            modes = [{"path": p, "uploadMode": way[p.endswith(".safetensors")], "shouldIgnore": False} for p in asked]
            return self.answer({"files": modes})
        if rest[:1] == ["commit"]:
            made = {}
            for line in map(json.loads, raw.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    made[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    made[value["path"]] = hub.large[value["oid"]]
            oid = hub.commit(name, made, revision)
            return self.answer({"commitUrl": f"{hub.address}/{name}/commit/{oid}", "commitOid": oid, "pullRequestUrl": None})
        if rest[:1] == ["tree"]:
            tree = [{"type": "file", "path": p, "size": len(x), "oid": hashlib.sha1(x).hexdigest()} for p, x in files.items()]
            return self.answer(tree)
        return self.answer(
            {"id": name, "modelId": name, "sha": oid, "siblings": [{"rfilename": path} for path in files], "tags": []}
        )

    def file(self, name: str, revision: str, path: str) -> None:
        if name not in self.server.commits:
            return self.missing("RepoNotFound")
        found = self.server.files(name, revision)
        if found is None:
            return self.missing("RevisionNotFound")
        oid, files = found
        if path not in files:
            return self.missing("EntryNotFound")
        return self.answer(files[path], ETag=f'"{hashlib.sha256(files[path]).hexdigest()}"', X_Repo_Commit=oid)
