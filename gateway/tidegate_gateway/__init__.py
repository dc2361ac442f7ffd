"""The gateway process (docs/architecture.md)."""

import tidegate_policy  # noqa: F401  (it chooses between the sources and the extensions that were made from them)
