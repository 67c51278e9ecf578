"""After a loss, layouts by number become layouts of the same kind for those who are left."""

from __future__ import annotations

import pytest

from terrazzo.planning import _kind
from terrazzo.records import Layout


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("auto", "auto"),
        ("tiles", "tiles"),
        ("whole", "whole"),
        ("samples", "samples"),
        ("samples:2,1", "samples"),
        ("channels:3", "channels"),
        (Layout.channels((1, 3)), "channels"),
        ("tiles:3x1", "auto"),
        (Layout.samples(2) + Layout.tiles(2), "auto"),
    ],
)
def test_the_kind_of_a_layout_stays(layout: str | Layout, kind: str) -> None:
    assert _kind(layout) == kind
