"""Draws are kept in a few large tensors, whatever pieces they come in."""

import contextlib
import weakref

import torch

from torchgpmc.storage.draws import Draw, DrawStore


def advance(number, *, batch=1, chains=3, weights=False):
    """Draws and statistics that say which they are."""
    own = number + torch.arange(batch, dtype=torch.float64).expand(chains, batch)
    draw = Draw(
        own[..., None] + torch.zeros(2).double(), own[..., None] + torch.zeros(5).double(), own.clone() if weights else None
    )
    return draw, {"lp": own.flatten() if batch == 1 else own.clone(), "diverging": torch.ones(chains * batch, dtype=torch.bool)}


def test_pieces_of_any_length_join_in_their_order():
    store, count = DrawStore(), 0
    for batch in [1] * 70 + [7, 40, 1, 3]:
        store.append(*advance(count, batch=batch, weights=True))
        count += batch
        assert len(store) == count
    draws, stats = store.joined()
    for found in (draws.theta[..., 1], draws.whitened[..., 4], draws.log_weight, stats["lp"]):
        assert torch.equal(found, torch.arange(count).double().expand(3, count))
    assert draws.further_whitened is None and stats["diverging"].dtype == torch.bool and stats["diverging"].all()


def test_a_piece_is_a_copy_that_another_store_goes_on_from():
    store = DrawStore()
    for number in range(50):
        store.append(*advance(number))
    piece = store.piece(20)
    for number in range(50, 120):
        store.append(*advance(number))
    assert torch.equal(piece["theta"][0, :, 0], torch.arange(20, 50).double())
    again = DrawStore()
    again.restore(store.piece(0))
    again.append(*advance(120))
    assert torch.equal(again.joined()[0].theta[0, :, 0], torch.arange(121).double())


def test_tensors_of_single_draws_are_let_go():
    """Where each stays, the allocator's free space is cut up by them: a run of sweeps over 200 latents grew by 2 MB a draw."""
    store, kept = DrawStore(), []
    for number in range(200):
        draw, stats = advance(number)
        kept += [weakref.ref(draw.whitened), weakref.ref(draw.theta), weakref.ref(stats["lp"])]
        store.append(draw, stats)
    del draw, stats
    assert sum(part() is not None for part in kept) < 3 * 40


def test_an_advance_that_was_interrupted_is_not_counted(monkeypatch):
    store = DrawStore()
    for number in range(31):
        store.append(*advance(number))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "cat", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))  # while draws are put together
        with contextlib.suppress(KeyboardInterrupt):
            store.append(*advance(31))
    assert len(store) == 32 and torch.equal(store.joined()[0].theta[0, :, 0], torch.arange(32).double())
