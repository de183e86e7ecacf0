"""The key-value store of JAX's distributed runtime, which all processes of a job have in common.

Each operation is atomic. Process 0 serves it, to all who reach its port (docs/multi_host.md).
"""

from typing import Any

import jax


class KeyValueStore:
    """Bytes by key, through the runtime's client."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def put(self, key: str, value: bytes) -> None:
        """Sets a key, whatever it holds."""
        self.client.key_value_set_bytes(key, value, allow_overwrite=True)

    def create(self, key: str, value: bytes) -> bytes:
        """Sets a key unless it has a value, and returns the one that it has then."""
        while True:
            try:
                self.client.key_value_set_bytes(key, value)
                return value
            except jax.errors.JaxRuntimeError as error:
                if not _has_status(error, "ALREADY_EXISTS"):
                    raise
            present = self.get(key)
            if present is not None:  # not deleted meanwhile
                return present

    def get(self, key: str) -> bytes | None:
        """The value, or None."""
        try:
            return self.client.key_value_try_get_bytes(key)
        except jax.errors.JaxRuntimeError as error:
            if not _has_status(error, "NOT_FOUND"):
                raise
            return None

    def wait(self, key: str, seconds: float) -> bytes | None:
        """The value, as soon as there is one; None if there is none for so long."""
        try:
            return self.client.blocking_key_value_get_bytes(key, max(1, round(1000 * seconds)))
        except jax.errors.JaxRuntimeError as error:
            if not _has_status(error, "DEADLINE_EXCEEDED"):
                raise
            return None

    def list(self, folder: str) -> dict[str, bytes]:
        """The values below a folder, by the rest of their keys."""
        prefix = f"{folder}/"
        pairs = self.client.key_value_dir_get_bytes(prefix)
        return {key.removeprefix(prefix): value for key, value in pairs}

    def delete(self, folder: str) -> None:
        """Removes everything below a folder."""
        self.client.key_value_delete(f"{folder}/")


def _has_status(error: Exception, status: str) -> bool:
    return status in str(error)
