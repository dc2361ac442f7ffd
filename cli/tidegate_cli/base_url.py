"""The address of a gateway or an engine, as people write it."""


def of(given: str) -> str:
    """The address with a scheme, and without the `/v1` that clients of OpenAI's API append."""
    url = given if "://" in given else f"http://{given}"
    return url.rstrip("/").removesuffix("/v1")
