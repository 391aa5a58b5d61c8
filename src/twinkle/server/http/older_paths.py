"""Other paths of our routes: those of earlier versions of the protocol and of the hosted service, which are answered
beside today's. One table, and the middleware for it.

A request to such a path gets today's path before anything else looks at it: routing, limits of bodies, the check of
Host headers, telemetry and, on Ray, the choice of a replica all see today's path alone, so nothing can be reached by an
older path that cannot be reached by today's. Only a path that leads to a route is changed; others get a 404.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from re import Pattern

from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from twinkle.server.config.applications import GATEWAY_PREFIX as API
from twinkle.server.config.applications import PROCESSOR_PREFIX
from twinkle.server.http.routes import NO_ROUTE, RouteTable


@dataclass(frozen=True)
class OlderPath:
    """An older form of paths, and today's forms, of which the first that has a route counts.

    A form is written as in a route; ``{x:path}`` matches several segments. ``of_model``: only if ``{model}`` is the
    name of a served model, because today's form does not contain it.
    """

    older: str
    today: tuple[str, ...]
    of_model: bool = False

    @cached_property
    def pattern(self) -> Pattern[str]:
        return compile_path(self.older)[0]


def _of_model(older: str, today: str) -> tuple[OlderPath, ...]:
    """Return the forms for models or samplers: with the protocol in the path, as today, and without it."""
    return (
        OlderPath(f"{older}/{{model:path}}/tinker/{{op:path}}", (f"{API}/{{op}}",), of_model=True),
        OlderPath(f"{older}/{{rest:path}}", (f"{today}/{{rest}}",)),
        OlderPath(f"{older}/{{model:path}}/upload_status/{{id}}", (f"{today}/{{model}}/twinkle/upload_status/{{id}}",)),
        OlderPath(f"{older}/{{model:path}}/{{verb}}", (f"{today}/{{model}}/twinkle/{{verb}}",)),
    )


# Tried in this order.
OLDER_PATHS: tuple[OlderPath, ...] = (
    OlderPath("/oai/api/v1/{rest:path}", ("/v1/{rest}",)),  # hosted Tinker's path of OpenAI's protocol
    OlderPath("/anthropic/api/{rest:path}", ("/anthropic/{rest}",)),  # and of Anthropic's
    OlderPath(f"/server{API}/{{rest:path}}", (f"{API}/{{rest}}",)),  # of a client whose base_url ends in /server
    OlderPath("/server/{rest:path}", (f"{API}/twinkle/{{rest}}", f"{API}/{{rest}}")),  # native routes come first
    *_of_model("/models", f"{API}/model"),
    *_of_model("/samplers", f"{API}/sampler"),
    OlderPath("/processors/twinkle/{verb}", (f"{PROCESSOR_PREFIX}/twinkle/{{verb}}",)),
    OlderPath("/processors/{verb}", (f"{PROCESSOR_PREFIX}/twinkle/{{verb}}",)),
    OlderPath("/twinkle/{rest:path}", (f"{API}/twinkle/{{rest}}",)),
    OlderPath("/tinker/{op:path}", (f"{API}/{{op}}",)),
    OlderPath(f"{API}/tinker/{{op:path}}", (f"{API}/{{op}}",)),
    OlderPath(f"{API}/model/{{model:path}}/tinker/{{op:path}}", (f"{API}/{{op}}",), of_model=True),
    OlderPath(f"{API}/sampler/{{model:path}}/tinker/{{op:path}}", (f"{API}/{{op}}",), of_model=True),
)
_PREFIXES = (
    "/oai/api/",
    "/anthropic/api/",
    "/server/",
    "/models/",
    "/samplers/",
    "/processors/",
    "/twinkle/",
    "/tinker/",
)
_TINKER = "/tinker/"
_LONGEST = 4096  # characters of a path: longer ones are no older paths, and matching takes time


class OlderPaths:
    """Finds today's path of an older one. ``routes``: the routes of the application."""

    def __init__(self, routes: RouteTable, table: Sequence[OlderPath] = OLDER_PATHS) -> None:
        self._routes = routes
        self._table = table

    def in_todays_form(self, scope: Scope, is_served: Callable[[str], bool]) -> Scope:
        """Return the scope of a request with today's path; the same scope if its path is not an older one.

        ``is_served``: whether a name is that of a served model.
        """
        path: str = scope["path"]
        if not path.startswith(_PREFIXES) and _TINKER not in path:  # nearly all requests
            return scope
        today = self._today(scope["method"], path, is_served)
        return scope if today is None else {**scope, "path": today, "raw_path": today.encode()}

    def _today(self, method: str, path: str, is_served: Callable[[str], bool]) -> str | None:
        # Without a line break, `{x:path}` always matches up to the end, so a form with two of them is tried at its last
        # `/tinker/` only. With one, each `/tinker/` would be tried, and the rest of the path read anew.
        if len(path) > _LONGEST or not path.isprintable():
            return None
        for one in self._table:
            match = one.pattern.match(path)
            if match is None or (one.of_model and not is_served(match["model"])):
                continue
            for form in one.today:
                today = form.format(**match.groupdict())
                if self._routes.find(method, today)[0] is not NO_ROUTE:
                    return today
        return None


class RewriteOlderPaths:
    """ASGI middleware that gives requests to older paths today's path. It comes before all others."""

    def __init__(self, app: ASGIApp, paths: OlderPaths) -> None:
        self._app = app
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            state = scope["app"].state
            scope = self._paths.in_todays_form(scope, lambda name: state.gateway.is_served(name))
        await self._app(scope, receive, send)
