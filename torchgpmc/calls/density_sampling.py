"""``sample_density``: the samplers, warm-up, checkpoints and warnings of ``sample`` for any log density."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from torchgpmc.arrays import as_tensor
from torchgpmc.calls.loop import Order
from torchgpmc.calls.settings import check_settings, checked_seed
from torchgpmc.checks import check_object, warn
from torchgpmc.density import AutogradDensity
from torchgpmc.diagnostics import complaints, complaints_about_divergences
from torchgpmc.diagnostics.chain_statistics import as_datatree
from torchgpmc.diagnostics.summaries import Summary, summarise
from torchgpmc.methods import NUTS
from torchgpmc.methods.density_options import DensityOptions
from torchgpmc.numerics.threads import one_torch_thread
from torchgpmc.runs.chain_targets import density_target
from torchgpmc.storage.checkpoint import Checkpoint, as_checkpoint
from torchgpmc.storage.fingerprint import density_fingerprint
from torchgpmc.types import LogDensity

Parts = Callable[[Tensor], Mapping[str, Tensor]]

_MOST_NAMED = 8  # chains in a message


class DensityDraws:
    """Draws from a density, made by :func:`sample_density`.

    Attributes:
        position: ``(chains, draws, D)``.
        stats: per-draw statistics ``(chains, draws)``: ``lp``, ``acceptance_rate``, ``n_steps``, ``diverging``, ...
        info: what was run: method, seed, steps, seconds, gradient evaluations; plain numbers and strings.

    Example:
        >>> import torch, torchgpmc as tg
        >>> start = torch.randn(4, 1, generator=torch.Generator().manual_seed(0))
        >>> density = lambda position: -0.5 * (position - 3).square().sum(-1)
        >>> draws = tg.sample_density(density, start, tg.HMC(num_steps=3), num_samples=1000, warmup_steps=200, progress=False)
        >>> draws.position.shape, 2.8 < draws.summary()["position"].mean < 3.2
        (torch.Size([4, 1000, 1]), True)
        >>> draws.complaints()
        []
        >>> draws.to_arviz().posterior["position"].shape
        (4, 1000, 1)
    """

    def __init__(self, position: Tensor, stats: dict[str, Tensor], info: dict[str, Any], parts: Parts | None = None):
        self.position = position
        self.stats = stats
        self.info = info
        self._parts = parts

    def _named(self) -> dict[str, Tensor]:
        parts = {"position": self.position} if self._parts is None else self._parts(self.position)
        return {**parts, "lp": self.stats["lp"]}

    def summary(self) -> Summary:
        """Mean, sd, 5 % and 95 % quantiles, bulk and tail effective sizes and rank R-hat of every coordinate, and of ``lp``."""
        return summarise(self._named())

    def complaints(self) -> list[str]:
        """What speaks against trusting these draws, one sentence each; empty if nothing does."""
        # -inf is how a density says where it ends, and no failure.
        stats = {name: value for name, value in self.stats.items() if name != "n_failures"}
        rows = self.summary()
        return complaints(rows, stats, len(self.position), None) + complaints_about_divergences(self._named(), rows, stats)

    def to_arviz(self) -> Any:
        """An ArviZ ``DataTree`` with groups ``posterior`` and ``sample_stats``; needs the extra ``arviz``."""
        stats = {name: value.numpy() for name, value in self.stats.items()}
        return as_datatree({"posterior": {"position": self.position.numpy()}, "sample_stats": stats})


def sample_density(
    density: LogDensity | Callable[[Tensor], Tensor],
    start: Tensor | ArrayLike,
    method: DensityOptions | None = None,
    *,
    num_samples: int = 1000,
    warmup_steps: int | None = None,
    num_chains: int | None = None,
    seed: int | None = None,
    progress: bool = True,
    checkpoint: str | os.PathLike[str] | Checkpoint | None = None,
    parts: Parts | None = None,
) -> DensityDraws:
    """Draws positions from any log density, by the Markov chains that :func:`torchgpmc.sample` runs on models.

    Args:
        density: the unnormalised log density ``(C, D) -> (C,)``, rows independent and their number free: chains that have finished
            a trajectory leave the batch. -inf outside the support. A function of torch operations, which autograd differentiates,
            or a :class:`torchgpmc.types.LogDensity` with a gradient of its own.
        start: where the chains start, ``(C, D)``, best further apart than the draws will be, so that R-hat can tell whether chains
            agree; or one position ``(D,)`` for all of ``num_chains``. Draws have its dtype and are made on its device.
        method: :class:`NUTS` (the default), :class:`HMC`, :class:`ChEES`, :class:`AdaptiveMH` or :class:`Slice`, without the
            options that speak of latents. ``MassMatrix.BLOCK`` means a diagonal here.
        num_samples: kept draws a chain.
        warmup_steps: steps before the first kept draw, in which the method tunes itself; ``num_samples`` by default.
        num_chains: only for a ``start`` of one position.
        seed: of all randomness; ``None`` takes that of the checkpoint, or draws one; ``draws.info["seed"]`` records it.
        progress: whether to show a bar with acceptance, step size and divergences.
        checkpoint: a path (or :class:`Checkpoint`): a run killed half-way resumes from it to the same bits.
        parts: of positions ``(C, S, D)``, ``{name: (C, S, *shape)}``, for summaries and warnings to name; by default ``position``.

    Returns:
        The draws. Warns (:class:`SamplingWarning`) in plain words if they are not to be trusted.

    Raises:
        TypeError: ``start`` is not numbers, or ``method`` of the wrong kind.
        ValueError: a number out of range; a start where the density is zero, or cannot be differentiated; rows that depend on one
            another; before any sampling.

    Example:
        >>> import torch, torchgpmc as tg
        >>> scales = torch.tensor([0.1, 1.0, 10.0])
        >>> start = scales * torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
        >>> density = lambda position: -0.5 * (position / scales).square().sum(-1)
        >>> draws = tg.sample_density(density, start, tg.HMC(num_steps=3), num_samples=500, warmup_steps=200, progress=False)
        >>> draws.position.shape, draws.complaints()
        (torch.Size([4, 500, 3]), [])
        >>> 8 < draws.summary()["position[2]"].sd < 12
        True
    """
    method = NUTS() if method is None else method
    known = "torchgpmc.NUTS(), HMC(), ChEES(), AdaptiveMH() or Slice()"
    check_object("method", method, "prepare_density", f"one that needs no Gaussian process: {known}")
    with one_torch_thread(), torch.inference_mode(False):
        start = _checked_start(start, num_chains)
        settings = check_settings(num_samples, warmup_steps, len(start), None)
        target: Any = density if hasattr(density, "value_and_grad") else AutogradDensity(density)
        _check_density(target, start, method.needs_gradients)
        file = as_checkpoint(checkpoint)
        order = Order(method, settings, checked_seed(seed, file), start.device, file, progress)
        run = method.prepare_density(density_target(target, start), settings)
        found, stats, info = order.carry_out(run, (start.shape[1], 0), lambda: density_fingerprint(target, start))
        draws = DensityDraws(found.theta, stats, info, parts)
        found_wanting = draws.complaints()
    for complaint in found_wanting:
        warn(complaint)
    return draws


def _checked_start(start: Any, num_chains: int | None) -> Tensor:
    """Positions ``(C, D)``."""
    start = as_tensor("start", start)
    start = start if start.is_floating_point() else start.double()
    if start.dim() == 1 and num_chains is not None:
        start = start.expand(num_chains, -1)
    if start.dim() != 2 or not start.numel() or num_chains not in (None, len(start)):
        raise ValueError(
            f"start has shape {tuple(start.shape)} and num_chains is {num_chains}. Expected (C, D), one row a chain, without "
            f"num_chains, or (D,) with it."
        )
    return start.detach().clone()


def _check_density(density: LogDensity, start: Tensor, with_gradient: bool) -> None:
    """Raises a ``ValueError`` unless chains can run from ``start``."""
    chains = len(start)
    value = density(start)
    if value.shape != (chains,):
        raise ValueError(
            f"the log density of positions {tuple(start.shape)} has shape {tuple(value.shape)}. Expected {(chains,)}, a number for "
            f"each row, for instance by .sum(-1)."
        )
    if with_gradient:
        value, _ = density.value_and_grad(start)
    lost = (~torch.isfinite(value)).nonzero().flatten().tolist()
    if lost:
        named = ", ".join(map(str, lost[:_MOST_NAMED])) + (", ..." if len(lost) > _MOST_NAMED else "")
        raise ValueError(
            f"the log density{' or its gradient' if with_gradient else ''} is not finite at the start of {len(lost)} of {chains} "
            f"chains ({named}). Expected every row of start to lie where it is; move them."
        )
    last = torch.tensor([chains - 1], device=start.device)
    alone = density.select(last)(start[last])
    if alone.shape != (1,) or not torch.allclose(alone, value[last], rtol=1e-3, atol=1e-3):
        raise ValueError(
            f"the log density of the last chain is {value[last].tolist()} beside the others and {alone.tolist()} alone. Expected "
            f"rows to be independent, and as many as are asked for."
        )
