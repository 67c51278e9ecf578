"""An error of ours that must come, for tests on devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from terrazzo.errors import TerrazzoError


def refusal(kind: type[TerrazzoError], act: Callable[[], Any]) -> str:
    with pytest.raises(kind) as refused:
        act()
    return str(refused.value)
