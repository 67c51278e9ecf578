"""What reports draw and how they word numbers."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
from PIL import Image

from terrazzo.cli.main import main
from terrazzo.errors import UsageError
from terrazzo.geometry import Box
from terrazzo.records.units import bytes_text, gap_text, seconds_text
from terrazzo.report import canvas, png
from terrazzo.report.planview import PlanView
from terrazzo.report.plot import plot
from terrazzo.report.svg import tag
from terrazzo.report.ticks import ticks


class TestDrawing:
    def test_curves_that_meet_and_part(self) -> None:
        one = {1: 4.0, 2: 2.0, 3: 0.0}
        same = "\n".join(plot(one, one, width=40))
        assert "●" in same and "x" not in same and "○" not in same
        apart = "\n".join(plot(one, {1: 4.0, 2: 3.9, 3: 4.0}, width=40))
        assert {"●", "x", "○"} <= set(apart)

    def test_losses_that_are_no_numbers(self) -> None:
        rows = plot({1: math.nan, 2: 1.0, 3: math.inf}, {}, width=30)
        assert sum(row.count("x") for row in rows) == 1
        assert plot({1: math.nan}, {}, width=30) == []

    def test_uneven_tiles(self) -> None:
        tiles = (Box(((0, 1), (0, 3), (0, 40), (0, 10))), Box(((0, 1), (0, 3), (0, 40), (10, 40))))
        rows = canvas.tiles(PlanView(2, (1, 3, 40, 40), tiles, tiles, ()), width=41)
        assert rows[0] == "┌" + "─" * 9 + "┬" + "─" * 29 + "┐"
        assert "device 1" in rows[1] and "40x30" in rows[2]
        assert rows[-1][10] == "┴"

    def test_pictures_survive_png(self) -> None:
        pixels = np.random.default_rng(0).integers(0, 256, (7, 5, 3), dtype=np.uint8)
        data = png.encode(pixels)
        assert np.array_equal(png.decode(data), pixels)
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(data))), pixels)

    @pytest.mark.parametrize("cut", [0, 4, 20, 60])
    def test_a_broken_png_is_refused(self, cut: int) -> None:
        data = png.encode(np.zeros((4, 4, 3), np.uint8))
        with pytest.raises(UsageError, match="no PNG of ours"):
            png.decode(data[:cut])

    def test_markup_is_escaped(self) -> None:
        assert tag("a", "<b>", tag("i", "&"), title='"') == (
            '<a title="&quot;">&lt;b&gt;<i>&amp;</i></a>'
        )


class TestWords:
    def test_units(self) -> None:
        assert [bytes_text(n) for n in (0, 999, 1023, 2048, 150 << 20)] == [
            "0 B", "999 B", "1.0 KiB", "2.0 KiB", "150 MiB"
        ]  # fmt: skip
        assert [seconds_text(s) for s in (0, 5e-5, 0.0123, 0.5, 2.5, 130)] == [
            "0 s", "50 µs", "12.3 ms", "500 ms", "2.50 s", "2 min 10 s"
        ]  # fmt: skip
        assert gap_text(0.0) == "0 (the same bits)"
        assert gap_text(math.nan) == "not a number"

    def test_ticks_are_round(self) -> None:
        assert ticks(0.0, 39.0, 4) == [0.0, 10.0, 20.0, 30.0]
        assert ticks(0.0, 0.0) == [0.0]
        assert ticks(math.nan, 1.0) == []

    @pytest.mark.parametrize("command", ["demo", "report"])
    def test_every_help_has_an_example(
        self, command: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        assert stop.value.code == 0
        assert f"examples:\n  terrazzo {command}" in capsys.readouterr().out
