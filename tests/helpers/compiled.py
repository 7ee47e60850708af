"""Tests of the compiled part are skipped by name where it was not built."""

import pytest

from mpishare import native

WHY_NONE = native.load()[1]
needs_compiled = pytest.mark.skipif(bool(WHY_NONE), reason=f"no compiled part: {WHY_NONE}")
