"""How long JAX has spent tracing, lowering and compiling."""

import time

import jax

_intervals = []


def _listen(event, seconds, **_):
    if "/compile/" in event:
        now = time.perf_counter()
        _intervals.append((now - seconds, now))


def watch_compilation():
    """Begins to take notice."""
    jax.monitoring.register_event_duration_secs_listener(_listen)


def compile_seconds():
    """Length of the union of the events' intervals: they lie within one another."""
    total, reached = 0.0, -float("inf")
    for begin, end in sorted(_intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
