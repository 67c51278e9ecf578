"""Credentials of a run: a key and a certificate that its devices share, and nobody else has.

The starter makes them anew for each run and brings them to the devices over SSH. Whoever shows
them is a device of this run: both ends of a control connection do, and what they say is encrypted.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from terrazzo.errors import LaunchError

VARIABLE = "TERRAZZO_CREDENTIALS"
"""Names the file that holds key and certificate; unset: a run on one machine, or a trusted one."""
NO_CLOCK = 0x200000  # X509_V_FLAG_NO_CHECK_TIME


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a device shows, and what it wants to see."""

    path: Path

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Credentials | None:
        name = environment.get(VARIABLE)
        return cls(Path(name)) if name else None

    def serving(self) -> ssl.SSLContext:
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def calling(self) -> ssl.SSLContext:
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, side: int) -> ssl.SSLContext:
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # it is the key that counts, not where it is shown
        context.verify_mode = ssl.CERT_REQUIRED
        # A board without a clock of its own may start in another year; a run's key is never old.
        context.verify_flags |= NO_CLOCK
        try:
            context.load_cert_chain(self.path)
            context.load_verify_locations(self.path)
        except (OSError, ssl.SSLError) as error:
            raise LaunchError(
                f"the credentials of this run cannot be read from {self.path}: {error}"
            ) from error
        return context
