"""The Arm64 sysroot for tests, or the reason why there is none."""

from __future__ import annotations

import functools

import pytest

from hermes.deploy.sysroot import Sysroot, build_sysroot
from hermes.errors import ResourceError


def obtain_sysroot() -> Sysroot:
    """Built once in the user's cache; skips the test where packages cannot be fetched."""
    found = _built()
    if isinstance(found, str):
        pytest.skip(f"no Arm64 runtime to test with: {found}")
    return found


@functools.cache
def _built() -> Sysroot | str:
    try:
        return build_sysroot()
    except ResourceError as error:
        return error.found
