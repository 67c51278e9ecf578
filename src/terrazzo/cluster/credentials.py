"""Making the credentials of a run: a fresh key, and a certificate that it has signed itself."""

from __future__ import annotations

import shutil
import subprocess

from terrazzo.errors import LaunchError

COMMAND = (
    "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
    "-keyout", "-", "-out", "-", "-subj", "/CN=a run of terrazzo", "-days", "3650", "-batch",
)  # fmt: skip


def make_credentials() -> str:
    """Key and certificate as PEM; they are kept in memory here, and in a private file there."""
    if shutil.which(COMMAND[0]) is None:
        raise LaunchError(
            "there is no openssl on this machine, with which the key of a run is made: install it"
        )
    try:
        done = subprocess.run(COMMAND, capture_output=True, text=True, check=True, timeout=60)
    except subprocess.SubprocessError as error:
        raise LaunchError(f"openssl could not make the key of this run: {error}") from error
    return done.stdout
