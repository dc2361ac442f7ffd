"""The address of a store as logs and people may see it."""


def shown(url: str) -> str:
    """The address without its user, its password and its query, which may have the password too."""
    scheme, _, rest = url.partition("?")[0].partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
