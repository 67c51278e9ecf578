"""A screen: any terminal, from wide and coloured to 40 columns of ASCII."""

from __future__ import annotations

from typing import IO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

PLAIN = str.maketrans(
    "×µ·–−’█▒░━─│┌┐└┘├┤┬┴┼╴╶╵╷●○",
    "xu---'#+.=-|+++++++++--||*o",
) | {ord("…"): "..."}


class Screen:
    """Prints words; what the terminal can't show becomes the nearest thing it can."""

    def __init__(self, file: IO[str] | None = None, *, width: int | None = None) -> None:
        self.console = Console(file=file, width=width, highlight=False, markup=False, emoji=False)
        self.unicode = self.console.encoding.lower().startswith("utf")
        self.width = max(self.console.width, 20)

    @property
    def pictures(self) -> bool:
        """Whether coloured half blocks can be drawn."""
        return self.unicode and self.console.color_system in ("truecolor", "256")

    def shown(self, text: str) -> str:
        """A text as this terminal can show it."""
        if self.unicode:
            return text
        return text.translate(PLAIN).encode("ascii", "replace").decode("ascii")

    def line(self, text: str = "", style: str = "") -> None:
        """One paragraph, wrapped at words."""
        self.console.print(Text(self.shown(text), style=style), width=self.width)

    def keys(self, *keys: str, style: str = "") -> None:
        """What the marks of a drawing mean, side by side; a line ends between two, not inside."""
        row = keys[0]
        for key in keys[1:]:
            longer = f"{row}   {key}"
            if cell_len(longer) > self.width:
                self.line(row, style)
                longer = key
            row = longer
        self.line(row, style)

    def raw(self, text: str, style: str = "") -> None:
        """One row of a drawing: never wrapped."""
        shown = Text(self.shown(text), style=style)
        self.console.print(shown, soft_wrap=True, overflow="ignore", crop=False)

    def text(self, text: Text) -> None:
        self.console.print(text, soft_wrap=True, overflow="ignore", crop=False)

    def title(self, text: str) -> None:
        self.line()
        self.line(text, "bold")
