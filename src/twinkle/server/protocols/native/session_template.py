"""Which template a session samples with: on the session's record, so that a restart of the server changes no result."""

from collections.abc import Mapping

from twinkle.server.backends.backend import ServedModel
from twinkle.server.state import Store
from twinkle.server.types import SessionRecord
from twinkle.server.verbs.templates import TemplateChoice

# In the user_metadata of a session: choices by the name of the model.
TEMPLATES_KEY = "twinkle.sampler_templates"


def chosen_template(session: SessionRecord | None, model: ServedModel) -> TemplateChoice:
    """The plain one where none was chosen."""
    choices = {} if session is None else session.user_metadata.get(TEMPLATES_KEY, {})
    assert isinstance(choices, Mapping), "we wrote it"
    choice = choices.get(model.name)
    return TemplateChoice() if choice is None else TemplateChoice.model_validate(choice)


async def choose_template(store: Store, session: SessionRecord, model: ServedModel, choice: TemplateChoice) -> None:
    await store.sessions.note(session.session_id, TEMPLATES_KEY, model.name, choice.model_dump())
