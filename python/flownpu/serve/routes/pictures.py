# SPDX-License-Identifier: Apache-2.0
"""/v1/images/generations."""

import base64
import time
from typing import Any

from fastapi import APIRouter, Request

from flownpu.serve.pictures import Painter
from flownpu.serve.requests.pictures import ImagesRequest
from flownpu.serve.routes.json_route import JsonRoute
from flownpu.serve.service import Service
from flownpu.serve.streams import unless_gone


def pictures_routes(service: Service) -> APIRouter:
    """The route to a server's models that make pictures."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/images/generations")
    async def generations(request: ImagesRequest, connection: Request) -> dict[str, Any]:
        first = request.request()
        files = await unless_gone(connection, service.of_kind(request.model, Painter).paint(first, request.n or 1))
        return {
            "created": int(time.time()),
            "data": [
                {"b64_json": base64.b64encode(file).decode(), "seed": first.seed + index}
                for index, file in enumerate(files)
            ],
            "background": "opaque",
            "output_format": "png",
        }

    return router
