"""Which cases of a test the fast suite takes."""

import pytest


def quick(chosen, cases):
    """Parameters of a test: ``chosen`` of the cases in every run, the others in `make test` alone."""
    return [pytest.param(*_values(case), marks=() if case in chosen else pytest.mark.slow) for case in cases]


def _values(case):
    return case if isinstance(case, tuple) else (case,)
