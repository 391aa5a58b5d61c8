"""What a server says once it serves: what, where, and how to connect."""

from collections.abc import Sequence

from twinkle.server.config import ServerConfig

LISTENING = "listening on"  # how a server announces itself


def announcement(config: ServerConfig, notes: Sequence[str], memory: Sequence[str], url: str) -> str:
    """``memory`` of each served model, in their order; empty where nobody here knows."""
    key = "tml-local" if config.auth.mode == "open" else "tml-… (twinkle-server keys create)"
    lines = [f"note: {note}" for note in notes]
    for number, served in enumerate(config.served_models):
        others = f" (also {', '.join(served.aliases)})" if served.aliases else ""
        lines += [f"serving {served.name}{others}", *(f"  {each}" for each in memory[number : number + 1])]
    if not config.served_models:
        lines.append("serving no model: nothing can be trained or sampled here")
    lines += [
        f"{LISTENING} {url}  (Tinker protocol under {url}/api/v1, OpenAI's under {url}/v1)",
        f"dashboard: {url}/dashboard",
        f"data in {config.data_dir}",
        f"keys: {'any key that begins with tml- is a tenant of its own' if config.auth.mode == 'open' else 'required'}",
        "connect:",
        f'  service = tinker.ServiceClient(base_url="{url}", api_key="{key}")',
        *(
            f'  training = service.create_lora_training_client(base_model="{served.name}")'
            for served in config.served_models[:1]
        ),
        f'  client = twinkle_client.init_twinkle_client("{url}")  # its second argument is the key',
    ]
    return "\n".join(lines)
