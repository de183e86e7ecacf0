"""The message of a process in a step, and the key-value store that messages travel through."""

import dataclasses
import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax

# The most that a message may have. Payloads are addresses and reasons, far below it.
MAX_BYTES = 1 << 20
# The most of a reason, which may hold an error message of any length.
MAX_REASON_BYTES = 1 << 14

_MAGIC = b"jax_ep 1"
_HEAD = struct.Struct("<8sIII")  # magic, bytes of the header, bytes of the payload, CRC of both


@dataclasses.dataclass(frozen=True)
class Message:
    """A payload and its subject; checked when it is read."""

    group: str  # key of the group that is opened or closed
    step: str
    payload: bytes = b""
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def encode(self) -> bytes:
        """The bytes that travel; raises ValueError if they are too many."""
        header = json.dumps([self.group, self.step, dict(self.facts)]).encode()
        size = _HEAD.size + len(header) + len(self.payload)
        if size > MAX_BYTES:
            raise ValueError(
                f"a message between processes must have at most {MAX_BYTES} bytes; that of group "
                f"{self.group}, step {self.step!r}, has {size}."
            )
        crc = zlib.crc32(self.payload, zlib.crc32(header))
        return _HEAD.pack(_MAGIC, len(header), len(self.payload), crc) + header + self.payload

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The message; raises ValueError with what is wrong, and copies nothing before."""
        if len(data) > MAX_BYTES:
            raise ValueError(f"it has {len(data)} bytes; the limit is {MAX_BYTES}")
        if len(data) < _HEAD.size or not data.startswith(_MAGIC):
            raise ValueError(f"it does not begin as one; it has {len(data)} bytes")
        _, n_header, n_payload, crc = _HEAD.unpack_from(data)
        if _HEAD.size + n_header + n_payload != len(data):
            raise ValueError(
                f"it has {len(data)} bytes and should have {_HEAD.size + n_header + n_payload}"
            )
        if zlib.crc32(data[_HEAD.size :]) != crc:
            raise ValueError("its checksum is wrong")
        end = _HEAD.size + n_header
        group, step, facts = _header(data[_HEAD.size : end])
        return cls(group, step, data[end:], facts)


def _header(data: bytes) -> tuple[str, str, dict[str, str]]:
    def is_header(x: Any) -> bool:
        return has_types(x, str, str, dict) and all(isinstance(v, str) for v in x[2].values())

    group, step, facts = parse_json(data, is_header, "its header")
    return group, step, facts


def has_types(x: Any, *types: Any) -> bool:
    """Whether a value is a list with elements of these types."""
    return isinstance(x, list) and len(x) == len(types) and all(map(isinstance, x, types))


def sent_json(process: int, data: bytes, is_valid: Callable[[Any], bool], what: str) -> Any:
    """`parse_json` of what a process has sent; raises RuntimeError, which names it."""
    try:
        return parse_json(data, is_valid, what)
    except ValueError as error:
        raise RuntimeError(f"process {process}: {error}") from None


def parse_json(data: bytes, is_valid: Callable[[Any], bool], what: str) -> Any:
    """The value; raises ValueError, which begins with `what`, if it is not valid.

    JSON as RFC 8259 defines it, of text that has a UTF-8 encoding: no NaN, no lone surrogates.
    """
    try:
        value = json.loads(data)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is not JSON: {error}") from None
    if not is_valid(value):
        shown = data[:80].decode(errors="replace")
        raise ValueError(f"{what} has another form than this version's: {shown}")
    return value


def reason_of(error: BaseException) -> str:
    """The text of an error, of limited length, with a UTF-8 encoding."""
    data = encodable(str(error) or type(error).__name__).encode()
    if len(data) <= MAX_REASON_BYTES:
        return data.decode()
    return data[:MAX_REASON_BYTES].decode(errors="ignore") + " [cut]"


def encodable(text: str) -> str:
    """The text, with lone surrogates escaped, as in a path that is not UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def difference(
    processes: tuple[int, int], groups: tuple[str, str], facts: tuple[Mapping, Mapping]
) -> str:
    """Says that two processes open different groups, and what differs; lower process first."""
    if processes[0] > processes[1]:
        processes, groups, facts = processes[::-1], groups[::-1], facts[::-1]
    (p, q), (a, b) = processes, facts
    names = [name for name in {**a, **b} if a.get(name) != b.get(name)] if a and b else []
    parts = [
        f"{name} is {_shown(a.get(name))} in process {p} and {_shown(b.get(name))} in process {q}"
        for name in names
    ]
    what = f": {'; '.join(parts[:5])}" if parts else ""
    return (
        f"process {p} opens group {groups[0]}, process {q} opens group {groups[1]}{what}. Every "
        "process that holds devices of the mesh must make the same calls of ep_init, with the same "
        "arguments, in the same order."
    )


def _shown(value: str | None) -> str:
    if value is None:
        return "unknown"
    return value if len(value) <= 100 else value[:100] + "..."


def shorten(fact: str) -> str:
    """A fact for a message, in at most about a thousand characters; different ones stay so."""
    if len(fact) <= 1000:
        return fact
    return f"{fact[:1000]}... ({hashlib.sha256(fact.encode()).hexdigest()[:12]})"


class KeyValueStore:
    """Bytes by key, in the store of JAX's distributed runtime, through the runtime's client.

    Each operation is atomic. Process 0 serves all who reach its port (docs/multi_host.md).
    """

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
            there = self.get(key)
            if there is not None:  # not deleted meanwhile
                return there

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
