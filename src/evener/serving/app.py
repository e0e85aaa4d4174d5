"""The live view as an ASGI app: the page, its events, and Prometheus metrics. It only reads.

/         the page        /events   server-sent events        /metrics   Prometheus
"""

import asyncio
from urllib.parse import urlencode

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from evener.report.page.html import page, policy
from evener.serving.access import Access
from evener.serving.feed import MOST_ONLOOKERS, Feed
from evener.serving.prometheus import CONTENT_TYPE, exposition

HEADERS = {
    "Content-Security-Policy": f"{policy(live=True)}; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_NO_PLAN = "the run has no plan yet: it is still measuring; this page asks again every 2 s"


def live_app(feed: Feed, access: Access) -> Starlette:
    """The app that shows the run of `feed` to those whom `access` allows."""

    async def show(request: Request) -> Response:
        await asyncio.to_thread(feed.look)
        if feed.document is None:
            return PlainTextResponse(_NO_PLAN, status_code=503, headers={"Refresh": "2", "Retry-After": "2"})
        return HTMLResponse(await asyncio.to_thread(page, feed.document, live=True))

    async def events(request: Request) -> Response:
        if feed.onlookers >= MOST_ONLOOKERS:
            return PlainTextResponse(f"{MOST_ONLOOKERS} pages look already", status_code=503)
        return StreamingResponse(feed.events(), media_type="text/event-stream")

    async def metrics(request: Request) -> Response:
        await asyncio.to_thread(feed.look)
        run = feed.follower.run
        if run is None:
            return PlainTextResponse(_NO_PLAN, status_code=503)
        raw = await asyncio.to_thread(exposition, run, feed.follower.seen)
        return Response(raw, headers={"Content-Type": CONTENT_TYPE})

    routes = [Route("/", show), Route("/events", events), Route("/metrics", metrics)]
    return Starlette(routes=routes, middleware=[Middleware(_Guard, access=access)])


class _Guard:
    """Asks `access` before anything else, and puts the headers on every response."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)  # start and end of the server
            return
        request = Request(scope)
        answer = self._access.answer(
            host=request.headers.get("host", ""),
            authorization=request.headers.get("authorization", ""),
            cookies=request.headers.get("cookie", ""),
            token=request.query_params.get("token"),
        )

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(k.lower().encode(), v.encode()) for k, v in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        app: ASGIApp = self._app
        if answer.do == "refuse":
            challenge = {"WWW-Authenticate": "Bearer"} if answer.status == 401 else None
            app = PlainTextResponse(answer.why + "\n", status_code=answer.status, headers=challenge)
        elif answer.do == "enter":
            app = self._enter(request)
        await app(scope, receive, with_headers)

    def _enter(self, request: Request) -> Response:
        """The same address without the token, which the cookie stands for from now on."""
        rest = urlencode([(k, v) for k, v in request.query_params.multi_items() if k != "token"])
        path = "/" + request.url.path.lstrip("/\\")  # two slashes would lead to another server
        response = RedirectResponse(f"{path}{f'?{rest}' if rest else ''}", status_code=303)
        response.set_cookie(
            self._access.cookie, self._access.session, httponly=True, samesite="strict", path="/"
        )
        return response
