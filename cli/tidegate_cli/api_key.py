"""The API key of commands that call a gateway: it comes from the environment, so that no list of processes shows it."""

import os

NAME = "TIDEGATE_API_KEY"


def headers() -> dict[str, str]:
    """The headers of a request with the key; none without a key."""
    key = os.environ.get(NAME)
    return {"authorization": f"Bearer {key}"} if key else {}
