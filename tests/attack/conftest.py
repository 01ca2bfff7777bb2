"""Pieces of the long attack."""

PIECE = 25


def pytest_generate_tests(metafunc):
    if "piece" in metafunc.fixturenames:
        first, count = (metafunc.config.getoption(f"--attack-{name}") for name in ("first", "models"))
        starts = range(first, first + count, PIECE)
        metafunc.parametrize(
            "piece", [range(start, min(start + PIECE, first + count)) for start in starts], ids=[str(s) for s in starts]
        )
