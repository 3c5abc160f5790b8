"""Weights for download: the files of external checkpoints, at signed URLs that need no API key.

A URL names one file of one checkpoint, and ends after an hour; clients ask for another. The key that signs
is kept in the server's directory, so that a restart ends no URL.
"""

import hashlib
import hmac
import os
import secrets
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, Response
from sqlalchemy.engine import Row
from starlette.exceptions import HTTPException

from rl.tinker.backend import NotFound, UserError
from rl.tinker.checkpoints import Checkpoints
from rl.tinker.database import now
from rl.tinker.paths import EXTERNAL

PREFIX = "/api/v1/downloads/"
_SECONDS = 3600
_KEY_BYTES = 32


class Downloads:
    """Signs URLs, and finds their files."""

    def __init__(self, checkpoints: Checkpoints):
        self._checkpoints = checkpoints
        self._root = checkpoints.root
        self._key = _secret(self._root / "download_key")

    def urls(self, checkpoint: Row) -> tuple[dict[str, str], int]:
        """(file -> the path of its URL, when they end, in seconds since 1970)"""
        expires = int(now()) + _SECONDS
        paths = {}
        for name in self._files(checkpoint):
            signature = self._sign(checkpoint, name, expires)
            parts = (str(expires), signature, checkpoint.model, checkpoint.name, name)
            paths[name] = PREFIX.lstrip("/") + "/".join(map(quote, parts))
        return paths, expires

    def file(self, expires: str, signature: str, model: str, checkpoint: str, name: str) -> Path:
        """Of a URL's parts.

        Raises NotFound where this server did not sign it or the file is gone, which look alike to whoever
        guesses, and HTTPException where it has ended.
        """
        gone = NotFound("there is no such download; ask for the checkpoint's URLs again")
        try:
            row = self._checkpoints.external(model, checkpoint)
        except (NotFound, UserError) as error:
            raise gone from error
        ends = int(expires) if expires.isdecimal() and len(expires) < 20 else 0
        if not hmac.compare_digest(signature.encode(), self._sign(row, name, ends).encode()):
            raise gone
        if ends < now():
            raise HTTPException(403, "this URL has ended; ask for the checkpoint's URLs again")
        if name not in self._files(row):
            raise gone
        return self._root / row.directory / name

    def _files(self, checkpoint: Row) -> list[str]:
        directory = self._root / checkpoint.directory
        return sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []

    def _sign(self, checkpoint: Row, name: str, expires: int) -> str:
        """Not of a checkpoint that is saved under the same name later."""
        signed = "\n".join((checkpoint.path, repr(checkpoint.created), name, str(expires)))
        return hmac.new(self._key, signed.encode("utf-8", "surrogateescape"), hashlib.sha256).hexdigest()


def _secret(path: Path) -> bytes:
    """Made where it is not there, for its owner alone."""
    partial = path.with_name(f"{path.name}.partial")
    if not path.exists():
        partial.unlink(missing_ok=True)
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
        partial.rename(path)
    return path.read_bytes()


def add_download_routes(api: APIRouter, checkpoints: Checkpoints) -> None:
    downloads = Downloads(checkpoints)

    @api.get("/training_runs/{id}/checkpoints/{kind}/{name}/external_weights_urls")
    async def external_weights_urls(id: str, kind: str, name: str, request: Request) -> Any:
        if kind != EXTERNAL:
            raise UserError(
                f"{kind[:80]}/{name[:80]} cannot be downloaded; save it with save_weights_external"
            )
        row = checkpoints.readable(request.state.tenant, f"tinker://{id}/{kind}/{name}")
        paths, expires = downloads.urls(row)
        base = str(request.base_url)
        return {"urls": {file: base + path for file, path in paths.items()}, "expires": expires}

    @api.get("/downloads/{expires}/{signature}/{model}/{name}/{file}")
    async def download(expires: str, signature: str, model: str, name: str, file: str) -> Response:
        path = downloads.file(expires, signature, model, name, file)
        return FileResponse(path, media_type="application/octet-stream", filename=file)
