"""Answers /livez and /readyz: alive while the event loop turns; a candidate that waits for the Lease is ready too."""

from __future__ import annotations

from aiohttp import web


async def serve(host: str, port: int) -> web.AppRunner:
    """Serve both until the runner is cleaned up."""

    async def alive(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    app = web.Application()
    app.router.add_get("/livez", alive)
    app.router.add_get("/readyz", alive)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner
