# SPDX-License-Identifier: Apache-2.0
"""The chat page at /: static files."""

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse

from flownpu.serve.errors import ApiError

FOLDER = Path(__file__).parent / "chat_page"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    # The page loads nothing from elsewhere, and no other page can show it in a frame. A model's text is put into the
    # page as text. If a bug inserts it as markup, scripts in it still do not run.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> APIRouter:
    """The routes of the page's files."""
    router = APIRouter()
    files = {file.name: file for file in FOLDER.iterdir() if file.suffix in KINDS}

    @router.get("/")
    async def page() -> FileResponse:
        return FileResponse(files["index.html"], media_type="text/html; charset=utf-8", headers=HEADERS)

    @router.get("/page/{name}")
    async def part(name: str) -> FileResponse:
        if name not in files:
            raise ApiError(404, f"the page has no file {name!r}")
        kind = f"{KINDS[files[name].suffix]}; charset=utf-8"
        return FileResponse(files[name], media_type=kind, headers=HEADERS)

    return router
