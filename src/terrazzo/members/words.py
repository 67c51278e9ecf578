"""Words: the council's messages as plain data, and back; anything else is refused."""

from __future__ import annotations

from typing import Any

from terrazzo.members import council
from terrazzo.members.council import Message
from terrazzo.members.view import View

KINDS = ("Alarm", "Prepare", "Promise", "Accept", "Accepted", "Decided", "Ready")


def written(message: Message) -> list[Any]:
    return [type(message).__name__, *message]


def read(data: Any) -> Message:
    """Raises ValueError for what nobody of us wrote."""
    try:
        kind, *fields = data
        if kind not in KINDS:
            raise ValueError(f"no message {kind!r}")
        if kind == "Decided":
            epoch, members, tie = fields[0]
            return council.Decided(View(int(epoch), _numbers(members), int(tie)))
        rest = [_plain(field) for field in fields]
        message: Message = getattr(council, kind)(*rest)
    except (TypeError, IndexError, KeyError) as error:
        raise ValueError(f"not a message of ours: {str(data)[:80]}") from error
    return message


def _plain(field: Any) -> Any:
    if isinstance(field, list):
        return tuple(_plain(part) for part in field)
    if field is None or isinstance(field, int):
        return field
    raise ValueError(f"not a number: {str(field)[:80]}")


def _numbers(fields: Any) -> tuple[int, ...]:
    return tuple(int(field) for field in fields)
