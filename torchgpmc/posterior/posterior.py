"""The result of sampling: draws by gpytorch's names, predictions, diagnostics, files."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from torchgpmc.adapter.conversion import as_likelihood
from torchgpmc.checks import check_count, warn
from torchgpmc.diagnostics import (
    complaints,
    complaints_about_choice,
    complaints_about_divergences,
    complaints_about_latents,
    complaints_about_runs,
    least_effective,
    verdict,
)
from torchgpmc.diagnostics.chain_statistics import as_datatree
from torchgpmc.diagnostics.summaries import Source, Summary, nested_rhat, summarise
from torchgpmc.fitted import Fitted
from torchgpmc.likelihoods.counts import checked_exposure
from torchgpmc.models.gp_model import GPModel
from torchgpmc.models.validation import check_test_inputs
from torchgpmc.numerics.random import make_generator
from torchgpmc.posterior.at_data import expected_responses, latents_of_draws
from torchgpmc.posterior.function_draws import FunctionDraws
from torchgpmc.posterior.named_samples import NamedSamples
from torchgpmc.posterior.saved import SavedDraws, read_draws, write_draws
from torchgpmc.prediction import Prediction
from torchgpmc.storage.draws import Draws


class Posterior:
    """Draws from the posterior of hyperparameters and latent function together.

    Made by :func:`torchgpmc.sample` and :meth:`load`.

    Attributes:
        model: a copy of the model as it was sampled, which predicts and is saved whatever becomes of the original.
        samples: name -> constrained draws ``(chains, draws, *shape)``, under gpytorch's own names.
        whitened: latents v ``(chains, draws, V)``, standard normal a priori; after :class:`ClassGibbs`, and of weighted draws whose
            likelihood ``predicts_quickly``, one of four a theta, all of which predictions average over.
        log_weights: ``(chains, draws)``, unnormalised; ``None`` for Markov chains, whose draws weigh the same.
        stats: per-draw statistics ``(chains, draws)``: ``lp``, ``acceptance_rate``, ``n_steps``, ``diverging``, ...
        info: what was run: method, seed, steps, seconds, gradient evaluations; plain numbers and strings.

    Example:
        >>> import torch, torchgpmc as tg
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch.priors import GammaPrior
        >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
        >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
        >>> posterior = tg.sample(model, tg.AMIS(), num_samples=4000, progress=False)
        >>> posterior.samples["kernel.lengthscale"].shape, posterior.latents.shape, posterior.log_weights.shape
        (torch.Size([1, 4000, 1, 1]), torch.Size([1, 4000, 8]), torch.Size([1, 4000]))
        >>> posterior.verdict()
        'Trustworthy: worst effective size ... (kernel.lengthscale).'
        >>> posterior.complaints(), posterior.effective_size() > 400
        ([], True)
        >>> posterior
        Posterior(GP: 1 x 4000 weighted draws of 1 hyperparameters and 8 latents; summary() says whether to trust them)
        >>> equal = posterior.resampled(1000)  # draws of equal weight, some of which repeat
        >>> equal.log_weights is None, (equal.num_chains, equal.num_draws)
        (True, (1, 1000))
    """

    def __init__(self, model: GPModel, draws: Draws, stats: dict[str, Tensor], info: dict[str, Any], source: Source | None = None):
        # Its owner may change it in place: a prior, a fixed value, the data. Two of its matrices are N x N, a gradient's are more.
        self.model = copy.deepcopy(model)
        self.theta = draws.theta
        self.whitened = draws.whitened
        self.log_weights = draws.log_weights
        self._further = draws.further_whitened
        self.stats = stats
        self.info = info
        self._source = source
        chains, count, size = draws.theta.shape
        flat = model.layout.constrain(draws.theta.reshape(chains * count, size).to(model.train_x.device))
        self.samples = NamedSamples({name: value.reshape(chains, count, *value.shape[1:]).cpu() for name, value in flat.items()})
        self._latents: Tensor | None = None
        self._table: tuple[Tensor | None, Summary] | None = None

    def __repr__(self) -> str:
        weighted = "" if self.log_weights is None else "weighted "
        return (
            f"Posterior({type(self.model).__name__}: {self.num_chains} x {self.num_draws} {weighted}draws of "
            f"{self.theta.shape[-1]} hyperparameters and {self.whitened.shape[-1]} latents; summary() says whether to trust them)"
        )

    @property
    def num_chains(self) -> int:
        """C; 1 for importance methods."""
        return self.theta.shape[0]

    @property
    def num_draws(self) -> int:
        """S, kept draws a chain."""
        return self.theta.shape[1]

    @property
    def latents(self) -> Tensor:
        """Function values at the data (GP) or the inducing points (SparseGP): ``(chains, draws, N or M)``, then K for several.

        Computed from ``whitened`` when first asked for: one factorisation a draw, or one for all of fixed hyperparameters.
        """
        if self._latents is None:
            joined = latents_of_draws(self.model, *self._flat(None))
            self._latents = joined.reshape(self.num_chains, self.num_draws, *joined.shape[1:])
        return self._latents

    def _flat(self, index: Tensor | None) -> tuple[Tensor, Tensor]:
        """Hyperparameters and latents ``(S, ...)`` of all draws, or of some."""
        rows: slice | Tensor = slice(None) if index is None else index
        device = self.model.train_x.device
        return self.theta.flatten(0, 1)[rows].to(device), self.whitened.flatten(0, 1)[rows].to(device)

    def _spaced(self, num_draws: int | None) -> Tensor:
        """Draws evenly spaced among those that weigh something: others may have infinite means, and zero times that is NaN."""
        weighing = (torch.softmax(self._log_weights(), 0) > 0).nonzero().squeeze(-1)
        if num_draws is None or num_draws >= len(weighing):
            return weighing
        return weighing[torch.linspace(0, len(weighing) - 1, num_draws).round().long()]

    def predict(
        self, x: Tensor | ArrayLike, *, num_draws: int | None = None, test_chunk: int = 2048, exposure: float | Tensor | None = None
    ) -> Prediction:
        """The predictive distribution at test inputs, hyperparameters and latents averaged out.

        Args:
            x: test inputs ``(T, D)``, or ``(T,)`` for one dimension.
            num_draws: use only this many draws, evenly spaced; all by default.
            test_chunk: test points handled at once, which bounds memory: for more of them, moments given each draw are worked out
                by chunks when an average, a density or draws are asked for, and not kept. Each draw is factorised once for all.
            exposure: of counts at the test points, a number or ``(T,)``; by default that of the data, if it is one number.

        Raises:
            ValueError: wrong shape, NaN or infinite values, a frame of other columns than ``train_x`` was, ``num_draws`` or
                ``test_chunk`` below 1, or an exposure that is not positive or of no use to the likelihood.

        Example:
            >>> import torch, torchgpmc as tg
            >>> from gpytorch.kernels import RBFKernel
            >>> from gpytorch.priors import GammaPrior
            >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
            >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
            >>> posterior = tg.sample(model, tg.AMIS(), num_samples=1000, progress=False)
            >>> posterior.predict([0.1, 0.9]).probs > 0.5
            tensor([False,  True])
        """
        x = check_test_inputs(x, self.model.train_x, self.model.columns)
        if num_draws is not None:
            check_count("num_draws", num_draws, example=", or None for all draws")
        check_count("test_chunk", test_chunk, example=", for instance 2048")
        index = self._spaced(num_draws)
        functions = self._functions(index)
        log_weights = self._log_weights()[index].to(x).repeat_interleave(functions.each)
        chunk = min(test_chunk, len(x))
        return Prediction(
            self.model,
            functions.marginals(x),
            len(x),
            chunk,
            functions.at_once(chunk),
            functions.likelihood_values(),
            torch.log_softmax(log_weights, 0),
            exposure=self._exposure(exposure, x),
            jointly=functions.jointly(x),
            each=functions.each,
        )

    def _exposure(self, exposure: float | Tensor | None, x: Tensor) -> Tensor | None:
        if exposure is None:
            return None
        found = checked_exposure(exposure).to(x)
        if found.dim() and len(found) != len(x):
            raise ValueError(f"exposure has shape {tuple(found.shape)}. Expected a number, or ({len(x)},), one a test point.")
        as_likelihood(self.model.likelihood).at_test_points(found)  # says so where there is no use for one
        return found

    def _functions(self, index: Tensor) -> FunctionDraws:
        """Some draws, with all latent vectors that are kept of each."""
        theta, v = self._flat(index)
        # Exact given theta: of normal latents, and one data set.
        integrates_out = self.model.is_conjugate and not self.model.targets.one_a_chain
        latents = v.unsqueeze(1)
        if self._further is not None and not integrates_out:
            latents = torch.cat([latents, self._further.flatten(0, 1)[index].to(v)], 1)
        return FunctionDraws(self.model, theta, latents, integrates_out)

    def fitted(self) -> Fitted:
        """The expected response at the data under each draw, noise left out: ``mean``, ``quantile(q)`` and ``draws``.

        Raises:
            ValueError: the model's latents leave f at the data open, as those of a SparseGP do.
            NotImplementedError: a likelihood of one's own that does not factorise has no ``expected_response(f)``.

        Example:
            >>> import torch, torchgpmc as tg
            >>> from gpytorch.kernels import RBFKernel
            >>> from gpytorch.priors import GammaPrior
            >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
            >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
            >>> posterior = tg.sample(model, tg.AMIS(), num_samples=1000, progress=False)
            >>> posterior.fitted().mean.round()  # probabilities of class 1 at the data
            tensor([0., 0., 0., 0., 1., 1., 1., 1.], dtype=torch.float64)
        """
        model = self.model
        if not model.settles_f_at_data:
            raise ValueError(
                f"fitted() is of f at the data, which the latents of {type(model).__name__} leave open. Expected a model with a "
                f"latent a datum, or a ProjectedProcess; use predict(train_x).mean."
            )
        theta, v = self._flat(None)
        latents = self.latents.flatten(0, 1).to(theta) if model.has_latents_at_data else v
        joined = expected_responses(model, theta, latents)
        return Fitted(joined.reshape(self.num_chains, self.num_draws, *joined.shape[1:]), self._log_weights())

    def _log_weights(self) -> Tensor:
        if self.log_weights is None:
            return torch.zeros(self.num_chains * self.num_draws, dtype=self.theta.dtype)
        return self.log_weights.flatten()

    def summary(self) -> Summary:
        """Mean, sd, 5 % and 95 % quantiles, bulk and tail effective sizes and rank R-hat of every hyperparameter, and of ``lp``.

        Weighted draws count by their weights; see :func:`torchgpmc.diagnostics.summaries.summarise`. The line above the table is
        :meth:`verdict`.

        Example:
            >>> import torch, torchgpmc as tg
            >>> from gpytorch.kernels import RBFKernel
            >>> from gpytorch.priors import GammaPrior
            >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
            >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
            >>> posterior = tg.sample(model, tg.AMIS(), num_samples=1000, progress=False)
            >>> summary = posterior.summary()
            >>> [row.name for row in summary], 0.1 < summary["kernel.lengthscale"].mean < 1
            (['kernel.lengthscale', 'lp'], True)
        """
        rows = self._rows()
        return Summary(list(rows.rows), self._verdict(rows))

    def _rows(self) -> Summary:
        """Worked out once: whether draws will do takes several questions, and of 61 hyperparameters ten estimates' time."""
        if self._table is None or self._table[0] is not self.log_weights:
            found = summarise({**self.samples, "lp": self.stats["lp"]}, self.log_weights)
            judged = found if self._source is None else Summary(self._source.judged(found.rows, self.num_draws))
            self._table = self.log_weights, judged
        return self._table[1]

    def verdict(self) -> str:
        """One line: "Trustworthy: ...", with the worst effective size, or "Do not trust: ..." with the first complaint.

        Draws of a method that is never exact have "Biased: ..." in place of the former.
        """
        return self._verdict(self._rows())

    def _verdict(self, rows: Summary) -> str:
        found = verdict(rows, self._least_effective(rows), self._complaints(rows), self.info.get("biased"))
        return found if self._source is None else f"{found} Resampled: {self.info['resampled']}."

    def _least_effective(self, rows: Summary) -> tuple[str, float]:
        # Latents of weighted draws, and of draws chosen from them, have no size of their own.
        latents = self.whitened if self._source is None else self.whitened[..., :0]
        return least_effective(rows, latents, self.log_weights)

    def effective_size(self) -> float:
        """Effective draws of the quantity that has fewest: of hyperparameters, ``lp`` and, of chains, the worst latent."""
        return self._least_effective(self._rows())[1]

    def resampled(self, num_draws: int, *, seed: int = 0) -> Posterior:
        """Draws of equal weight ``(1, num_draws)``, chosen with replacement by weight: some repeat, as ``info["resampled"]`` says.

        Of draws that weigh the same, evenly spaced ones, so that a script need not know which engine served. What spoke against
        the draws speaks against these, whose effective sizes follow from the others' and ``num_draws``.

        Args:
            num_draws: how many.
            seed: of the choice.

        Raises:
            ValueError: ``num_draws`` is below 1.

        Example:
            >>> import torch, torchgpmc as tg
            >>> from gpytorch.kernels import RBFKernel
            >>> from gpytorch.priors import GammaPrior
            >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
            >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
            >>> posterior = tg.sample(model, tg.AMIS(), num_samples=1000, progress=False)
            >>> equal = posterior.resampled(200)
            >>> equal.log_weights is None, equal.latents.shape
            (True, torch.Size([1, 200, 8]))
        """
        check_count("num_draws", num_draws)
        weights = torch.softmax(self._log_weights(), 0)
        if self.log_weights is None and num_draws <= len(weights):
            rows = self._spaced(num_draws)
        else:
            rows = torch.multinomial(weights, num_draws, replacement=True, generator=make_generator(seed))
        theta, whitened = (part.flatten(0, 1)[rows][None] for part in (self.theta, self.whitened))
        further = None if self._further is None else self._further.flatten(0, 1)[rows][None]
        draws = Draws(theta, whitened, None, further_whitened=further)
        stats = {name: value.flatten(0, 1)[rows][None] for name, value in self.stats.items()}
        chosen = "draws" if self.log_weights is None else "draws by weight"
        label = f"{num_draws} {chosen} from {len(weights)}; {len(rows.unique())} of them differ"
        return Posterior(self.model, draws, stats, {**self.info, "resampled": label}, Source(self._rows().rows, self.complaints()))

    def complaints(self) -> list[str]:
        """What speaks against trusting these draws, one sentence each; empty if nothing does."""
        return self._complaints(self._rows())

    def _complaints(self, rows: Summary) -> list[str]:
        if self._source is not None:
            return complaints_about_choice(rows, self._source)
        found = [self.info["missed"]] if "missed" in self.info else []
        found += complaints(rows, self.stats, self.num_chains, self.log_weights, self.info.get("begun"))
        named = {**self.samples, "lp": self.stats["lp"]}
        if self.log_weights is not None:
            return found + complaints_about_runs(named, self.stats, self.log_weights)
        return found + complaints_about_divergences(named, rows, self.stats) + complaints_about_latents(self.whitened)

    def nested_rhat(self, name: str, superchain_ids: list[int]) -> Tensor:
        """R-hat for many short chains in groups that share a start, for each element of ``samples[name]``.

        Arguments and errors are those of :func:`torchgpmc.diagnostics.summaries.nested_rhat`.
        """
        values = self.samples[name]
        flat = values.reshape(*values.shape[:2], -1)
        return torch.tensor([nested_rhat(flat[..., i], superchain_ids) for i in range(flat.shape[-1])]).reshape(values.shape[2:])

    def to_arviz(self) -> Any:
        """An ArviZ ``DataTree`` with groups ``posterior``, ``sample_stats`` and ``observed_data``; needs the extra ``arviz``.

        Warns (:class:`SamplingWarning`) where draws are weighted, since ArviZ takes all draws for equal: the weights are among the
        statistics, and ``resampled(n).to_arviz()`` needs none.

        Example:
            >>> import torch, torchgpmc as tg
            >>> from gpytorch.kernels import RBFKernel
            >>> from gpytorch.priors import GammaPrior
            >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
            >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
            >>> posterior = tg.sample(model, tg.AMIS(), num_samples=1000, progress=False)
            >>> posterior.resampled(200).to_arviz().posterior["latents"].shape  # of chains, draws and data
            (1, 200, 8)
        """
        groups: dict[str, dict[str, Any]] = {
            "posterior": {name: value.numpy() for name, value in self.samples.items()},
            "sample_stats": {name: value.numpy() for name, value in self.stats.items()},
        }
        groups["posterior"]["latents"] = self.latents.numpy()
        if self.log_weights is not None:
            warn(
                "these draws are weighted, and ArviZ's summaries and plots take all draws for equal. Export "
                "posterior.resampled(n).to_arviz() in their place, or apply sample_stats['log_weight'] yourself."
            )
            groups["sample_stats"]["log_weight"] = self.log_weights.numpy()
        if not self.model.targets.one_a_chain:
            groups["observed_data"] = {"y": self.model.train_y.cpu().numpy()}
        return as_datatree(groups)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes draws, statistics and settings to one file, atomically; tensors, numbers and strings only.

        Example:
            >>> import tempfile, torch, torchgpmc as tg
            >>> from gpytorch.kernels import RBFKernel
            >>> from gpytorch.priors import GammaPrior
            >>> x, kernel = torch.linspace(0, 1, 8), RBFKernel(lengthscale_prior=GammaPrior(2.0, 4.0))
            >>> model = tg.GP(x, (x > 0.5).int(), kernel, tg.likelihoods.Bernoulli())
            >>> posterior = tg.sample(model, tg.AMIS(), num_samples=1000, progress=False)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     posterior.save(f"{folder}/posterior.pt")
            ...     again = tg.Posterior.load(f"{folder}/posterior.pt", model)
            >>> torch.equal(again.latents, posterior.latents)
            True
        """
        draws = Draws(self.theta, self.whitened, self.log_weights, further_whitened=self._further)
        write_draws(path, self.model, SavedDraws(draws, self.stats, self.info, self._source))

    @staticmethod
    def load(path: str | os.PathLike[str], model: GPModel) -> Posterior:
        """Reads what :meth:`save` wrote, for a model with the same density: data, kernel, mean, likelihood, priors, constants.

        The model may live on another device, and sampled parameters may have other present values. :meth:`save` has an example.

        Raises:
            TypeError: ``model`` is none.
            ValueError: not such a file, one made with another model, or one whose draws are not of this model's shape.
        """
        return Posterior(model, *read_draws(path, model))
