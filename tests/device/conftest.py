import pytest

from tests.device.other import other_device


@pytest.fixture(autouse=True)
def waits():
    """How often the host waited within the test, all of which runs beside the other device."""
    with other_device() as counts:
        yield counts
