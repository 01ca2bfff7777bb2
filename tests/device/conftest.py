import pytest

from tests.device.pretended import pretended_device


@pytest.fixture(autouse=True)
def waits():
    """How often the host waited within the test, all of which runs beside the pretended device."""
    with pretended_device() as counts:
        yield counts
