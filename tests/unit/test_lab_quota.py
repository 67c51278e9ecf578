"""How much of a machine devices get, and when it is not enough."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terrazzo.errors import LabError
from terrazzo.lab.network import burst_bytes, frame_bits_per_s
from terrazzo.lab.quota import CpuQuota, require_fit, require_memory, threads_of


class TestQuota:
    @given(st.floats(0.001, 64.0))
    def test_the_kernel_takes_it(self, cores: float) -> None:
        quota = CpuQuota.of(cores)
        assert quota.quota_us >= 1_000
        assert 1_000 <= quota.period_us <= 1_000_000
        assert quota.cores == pytest.approx(cores, rel=0.01)

    def test_the_period_stays_short(self) -> None:
        assert CpuQuota.of(0.15) == CpuQuota(1_500, 10_000)
        assert CpuQuota.of(0.05) == CpuQuota(1_000, 20_000)  # no less than 1 ms of time

    def test_less_than_the_kernel_gives(self) -> None:
        with pytest.raises(LabError, match=r"no less than 0\.001"):
            CpuQuota.of(0.0005)

    def test_threads_are_those_the_share_keeps_busy(self) -> None:
        assert [threads_of(cores, 4) for cores in (0.1, 1.0, 1.04, 1.2, 9.0)] == [1, 1, 1, 2, 4]


class TestFit:
    def test_says_what_is_missing_and_what_would_fit(self) -> None:
        require_fit([0.3] * 6, cores=2)
        says = r"needs 2\.10 cores.*has 2 of which 1\.80.*0\.30 missing; the first 6 of its 7"
        with pytest.raises(LabError, match=says):
            require_fit([0.3] * 7, cores=2)

    def test_other_labs_count(self) -> None:
        with pytest.raises(LabError, match=r"other labs hold 1\.50.*first 1 of its 2"):
            require_fit([0.2, 0.2], cores=2, held=1.5)
        with pytest.raises(LabError, match="not one of its devices"):
            require_fit([3.0], cores=2)

    def test_memory(self) -> None:
        require_memory([1 << 30] * 4, free_bytes=4 << 30, what="4xpi3")
        with pytest.raises(LabError, match=r"4xpi3 may fill 4\.0 GiB.*1\.0 GiB missing.*first 3"):
            require_memory([1 << 30] * 4, free_bytes=3 << 30, what="4xpi3")


class TestShaping:
    def test_headers_are_let_through_beside_the_payload(self) -> None:
        # A full frame takes 1538 bytes of a 100 Mbit line, and the shaper counts 1514 of them.
        assert frame_bits_per_s(94.15e6) == pytest.approx(100e6 * 1514 / 1538, rel=1e-3)

    def test_bursts_are_about_a_millisecond(self) -> None:
        assert burst_bytes(94e6) == 16_384
        assert burst_bytes(940e6) == pytest.approx(940e6 / 8 * 1e-3, rel=0.05)
