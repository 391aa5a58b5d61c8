"""The JSON requests that look for sessions, and what they look for."""

from typing import Annotated, Literal

from pydantic import AwareDatetime, Field

from twinkle.server.types import FinishReason
from twinkle.server.wire.fields import Id, Label, Metadata, Request, Text


class AssignProjectRequest(Request):
    project_id: Annotated[Label, Field(min_length=1)]


class Owner(Request):
    """Whose sessions: here there are only one's own. ``owner_urns``: tenants, as summaries name them."""

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: Annotated[list[Text], Field(max_length=10)] | None = None


class Status(Request):
    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: Annotated[list[FinishReason], Field(min_length=1)] | None = None


class SearchCursor(Request):
    """The last session of the page before. JSON has no times: they are read from text."""

    last_created_at: Annotated[AwareDatetime, Field(strict=False)]
    last_session_id: Id


class SearchSessionsRequest(Request):
    session_id: Id | None = None
    project_ids: Annotated[list[Text], Field(max_length=100)] | None = None
    user_metadata: Annotated[Metadata, Field(default_factory=dict)]
    display_name: Annotated[Text, Field(min_length=1)] | None = None
    owner: Annotated[Owner, Field(default_factory=Owner)]
    statuses: Annotated[list[Status], Field(min_length=1, max_length=10)] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: SearchCursor | None = None
