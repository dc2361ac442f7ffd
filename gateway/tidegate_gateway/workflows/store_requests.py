"""A request of a client that needs the store: it waits for the store only while the store answers."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from tidegate_gateway.openai import error_table
from tidegate_gateway.store import store_contract, store_link

S = TypeVar("S")
T = TypeVar("T")


async def ask(link: store_link.StoreLink, store: S | None, operation: Callable[[S], Awaitable[T]]) -> T:
    """One operation of the store. Raises `Shed` if the store cannot be reached, and `store_contract.Rejected`."""
    if store is None:
        raise error_table.no_store()
    if not link.up:
        raise error_table.store_unavailable()
    try:
        return await operation(store)
    except store_contract.Unavailable as error:
        link.failed(error)
        raise error_table.store_unavailable() from error
