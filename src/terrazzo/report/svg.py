"""Markup in a few words: elements of HTML and SVG, with everything escaped."""

from __future__ import annotations

from html import escape

VOID = ("br", "hr", "img", "input", "meta")


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: object) -> Markup:
    """``tag("rect", x=3, class_="tile")``: a trailing underscore keeps clear of Python's words."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_value(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(*children)}</{name}>")


def join(*children: str) -> Markup:
    """Markup as it is, everything else escaped."""
    return Markup(
        "".join(child if isinstance(child, Markup) else escape(child) for child in children)
    )


def _value(value: object) -> str:
    """Numbers as short as a screen needs them."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def percent(share: float) -> str:
    return f"{100 * share:.3f}%"
