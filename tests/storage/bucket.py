"""A bucket of Google Cloud Storage inside the test's own process: `gs://` paths without network or credentials."""

import io
import json
import logging
import re
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from http.server import HTTPServer
from typing import Any, BinaryIO
from urllib.parse import parse_qs, unquote, urlsplit

import fsspec.config
import pytest
from gcp_storage_emulator.handlers import buckets
from gcp_storage_emulator.server import RequestHandler
from gcp_storage_emulator.storage import Storage

_OBJECT = re.compile(r".*/b/(?P<bucket>[^/]+)/o(/(?P<name>[^/]+))?")
_MOVE = re.compile(r"(?P<source>.*/b/(?P<bucket>[^/]+)/o/(?P<name>[^/]+))/moveTo/o/(?P<target>[^/]+)")
_NAME = re.compile(rb'"name": *("(?:[^"\\]|\\.)*")')
_ABSENT = "0"  # the generation of an object that is not there


class Bucket:
    """An empty bucket that outlives its server: `stop` makes it unreachable, `start` reachable again.

    Attributes:
        url: `gs://` and a name that no other bucket of this process has, as clients cache what they know by name.
        environment: the variables with which a program finds the bucket; set them before it first uses a `gs://` path.
        refusal: the status that answers requests, e.g. FORBIDDEN, or SERVICE_UNAVAILABLE, which clients take for a
            reason to try again; None serves them.
        refused: a part of the paths that are refused; the default is in all of them.
    """

    def __init__(self) -> None:
        name = f"test-{uuid.uuid4().hex}"
        self.url = f"gs://{name}"
        self.refusal: HTTPStatus | None = None
        self.refused = "/"
        self._storage = Storage(use_memory_fs=True)
        buckets.create_bucket(name, self._storage)
        # Otherwise the emulator keeps what was deleted, and writes it all out with each change.
        self._storage.buckets[name]["softDeletePolicy"] = {"retentionDurationSeconds": "0"}
        self._port = 0  # any free port, kept from the first start on
        self.start()
        address = f"http://127.0.0.1:{self._port}"
        self.environment = {
            "STORAGE_EMULATOR_HOST": address,  # gcsfs, google-cloud-storage
            "TENSORSTORE_GCS_HTTP_URL": address,
            # Neither looks for credentials on the machine or in the network.
            "FSSPEC_GCS_TOKEN": "anon",
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",  # tensorstore
            # Asks for the kind of the bucket by gRPC, at Google.
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            # A TensorFlow that happens to be installed would open the paths, and knows no emulator.
            "EPATH_USE_TF": "false",
        }

    def start(self) -> None:
        self._server = _Server(("127.0.0.1", self._port), partial(_Handler, self._storage, self))
        self._port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def local_bucket() -> Iterator[Bucket]:
    """A bucket that this process and the ones it starts can use until the end of the block."""
    # It reports every object that is not there as an error.
    logging.getLogger("gcp_storage_emulator.storage").setLevel(logging.CRITICAL)
    bucket = Bucket()
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in bucket.environment.items():
            patch.setenv(variable, value)
        # fsspec read the environment when it was imported.
        patch.setitem(fsspec.config.conf, "gcs", fsspec.config.conf.get("gcs", {}) | {"token": "anon"})
        try:
            yield bucket
        finally:
            bucket.stop()


class _Server(HTTPServer):
    request_queue_size = 128  # tensorstore opens tens of connections at once

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that hung up, as one that was killed does, or gcsfs when it needs the answer no more.
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(RequestHandler):
    """Adds to the emulator what it lacks: moves, conditional writes, and no object from half an upload."""

    timeout = 10.0  # one client at a time, so none may keep the others waiting
    path: str
    rfile: BinaryIO

    def __init__(self, storage: Storage, bucket: Bucket, *args: object) -> None:
        self._bucket = bucket
        super().__init__(storage, *args)

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        length = int(self.headers.get("Content-Length", 0))
        self._body = self.rfile.read(length)
        if len(self._body) < length:
            raise ConnectionAbortedError(f"{len(self._body)} bytes of {length}")
        if length:
            self.rfile = io.BytesIO(self._body)
        wanted = parse_qs(urlsplit(self.path).query).get("ifGenerationMatch", [self._generation()])
        refusal = self._bucket.refusal if self._bucket.refused in self.path else None
        if refusal is None and wanted != [self._generation()]:
            refusal = HTTPStatus.PRECONDITION_FAILED
        if refusal is not None:
            self.send_error(refusal)
        return refusal is None

    def do_POST(self) -> None:
        move = _MOVE.fullmatch(urlsplit(self.path).path)
        if move is None:
            return super().do_POST()
        if self._generation() == _ABSENT:
            return self.send_error(HTTPStatus.NOT_FOUND)
        self.path = f"{move['source']}/copyTo/b/{move['bucket']}/o/{move['target']}"
        super().do_POST()
        return self.storage.delete_file(move["bucket"], unquote(move["name"]))

    def end_headers(self) -> None:
        if self.command == "GET":
            self.send_header("x-goog-generation", self._generation())
        super().end_headers()

    def _generation(self) -> str:
        """Of the object that the request is about."""
        url = urlsplit(self.path)
        about = _OBJECT.match(url.path)
        if about is None:
            return _ABSENT
        query = parse_qs(url.query)
        name = unquote(about["name"] or "") or query.get("name", [""])[0]
        if not name and "uploadType" in query:  # google-cloud-storage names it in the body, ahead of the content
            named = _NAME.search(self._body)
            name = json.loads(named[1]) if named else ""
        return self.storage.objects.get(about["bucket"], {}).get(name, {}).get("generation", _ABSENT)
