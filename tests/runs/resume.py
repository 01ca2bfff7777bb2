"""Runs that die and go on: what the tests of ``sample`` and of samplers share."""

import functools

import torch

import torchgpmc as tg
from torchgpmc.runs.chain import ChainRun


class Stop(Exception):
    """What a run dies of."""


def same(a, b):
    """Whether two posteriors hold the same bits."""
    return (
        torch.equal(a.theta, b.theta)
        and (a.log_weights is b.log_weights is None or torch.equal(a.log_weights, b.log_weights))
        and torch.equal(a.whitened, b.whitened)
        and all(torch.allclose(a.stats[k], b.stats[k], rtol=0, atol=0, equal_nan=True) for k in a.stats)
    )


@functools.cache
def whole_run(make, method, options):
    """The run that the others of one method are held against: of ``make("probit")``, with options as pairs."""
    return tg.sample(make("probit"), method, **dict(options))


def dies_and_resumes(make, method, options, advances, path, monkeypatch):
    """Whether a run of chains that dies before that advance, and is then called again, is the whole run to the bit."""
    model, checkpoint = make("probit"), tg.Checkpoint(path, every=1)
    advance, died = ChainRun.advance, []

    def dying(self, state, generator):
        if state.iteration == advances:
            raise Stop
        return advance(self, state, generator)

    with monkeypatch.context() as patch:
        patch.setattr(ChainRun, "advance", dying)
        try:
            tg.sample(model, method, **options, checkpoint=checkpoint)
        except Stop:
            died.append(True)
    assert died, f"the run ended before advance {advances}"
    return same(whole_run(make, method, tuple(options.items())), tg.sample(model, method, **options, checkpoint=checkpoint))
