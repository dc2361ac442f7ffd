"""The `tidegate` program: every part of the system by one name, and `up`, which composes them on one machine."""
