"""Rooms (folders, and files beside them) that a reader meets who follows one call to its end; the house is in docs/design.md."""

import sys

import torch

import torchgpmc as tg
from tests.problems import gp
from torchgpmc.runs.run import Settings

PACKAGE = tg.__name__ + "."


def rooms_met(function):
    """Rooms of the package whose functions run while ``function()`` does."""
    rooms = set()

    def note(frame, event, _):
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith(PACKAGE):
            rooms.add(name.split(".")[1])

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return rooms


def test_a_gradient_of_the_full_gp_meets_at_most_eight_rooms():
    model = gp("probit")
    density = tg.joint_log_density(model)
    position = torch.zeros(3, model.layout.size + model.latent_size, dtype=torch.float64)
    rooms = rooms_met(lambda: density.value_and_grad(position))
    assert {"models", "parameters", "adapter", "likelihoods", "numerics"} <= rooms  # the trace sees
    assert len(rooms) <= 8, sorted(rooms)


def test_a_batch_of_importance_sampling_meets_at_most_twelve_rooms(generator):
    """The first batch, which also settles where later ones start, and the second, which goes on from there."""
    run = tg.AMIS().prepare(gp("probit"), Settings(100, None, None, None))
    state = run.init(generator)
    for _ in range(2):
        batch = []
        rooms = rooms_met(lambda state=state, batch=batch: batch.extend(run.advance(state, generator)))
        state = batch[0]
        assert {"runs", "importance", "evidence", "approximations", "models"} <= rooms
        assert len(rooms) <= 12, sorted(rooms)
