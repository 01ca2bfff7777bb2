"""scikit-learn estimators: Gaussian processes whose hyperparameters are averaged over, not optimised."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import Kernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.priors import GammaPrior, LogNormalPrior, Prior
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from torchgpmc.arrays import as_tensor
from torchgpmc.calls.sampling import sample
from torchgpmc.checks import SamplingWarning, check_count, warn
from torchgpmc.likelihoods import Bernoulli, Softmax
from torchgpmc.methods import Method
from torchgpmc.models import GP, GPModel, GPRegression, SparseGP, kmeans_inducing_points
from torchgpmc.models.validation import check_squarable
from torchgpmc.posterior import Posterior

_FULL = 500  # data up to which every datum has a latent of its own
_NUM_INDUCING = 100  # beyond


def default_kernel(num_columns: int, variance_prior: Prior) -> Kernel:
    """A squared exponential for D standardised columns: distances grow with sqrt(D), and so does the prior of the lengthscale.

    The lengthscale's prior is LogNormal(sqrt(2) + log(D) / 2, sqrt(3)) (Hvarfner, Hellsten & Nardi 2024).

    Args:
        num_columns: D.
        variance_prior: of the kernel's variance.

    Example:
        >>> kernel = default_kernel(4, GammaPrior(2.0, 0.5))
        >>> round(float(kernel.base_kernel.lengthscale_prior.loc), 4)  # sqrt(2) + log(4) / 2
        2.1074
    """
    lengthscale = LogNormalPrior(math.sqrt(2) + 0.5 * math.log(num_columns), math.sqrt(3))
    return ScaleKernel(RBFKernel(lengthscale_prior=lengthscale), outputscale_prior=variance_prior)


def _found_device(device: Any) -> torch.device:
    """The device that was asked for.

    Raises:
        ValueError: torch knows none of that name, or has none here.
    """
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError) as error:  # torch's, of names, of builds without it, and of other kinds
        has = "'cpu' or 'cuda'" if torch.cuda.is_available() else "'cpu'"
        raise ValueError(f"device is {device!r}. Expected one that torch has here, {has}; or None, for the CPU.") from error
    return found


class _Estimator(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """What both estimators do with inputs, models and seeds."""

    kernel: Kernel | None
    method: Method | None
    num_samples: int | None
    inducing_points: int | Any
    normalize_x: bool
    random_state: Any
    device: Any
    verbose: bool

    def _scaled(self, X: Any) -> np.ndarray:
        return self._scaler.transform(X) if self.normalize_x else np.asarray(X)

    def _fit_inputs(self, X: np.ndarray) -> np.ndarray:
        check_squarable("X", as_tensor("X", X))
        self._scaler = StandardScaler().fit(X)
        return self._scaled(X)

    def _inducing(self, x: np.ndarray, seed: int) -> torch.Tensor | None:
        """Z ``(M, D)`` on the scale of the model's inputs, or ``None`` for a latent a datum."""
        wanted = self.inducing_points
        if wanted is None:
            if len(x) <= _FULL:
                return None
            wanted = _NUM_INDUCING
        if isinstance(wanted, int | np.integer):
            check_count("inducing_points", int(wanted))
            return kmeans_inducing_points(x, min(int(wanted), len(x)), seed=seed)
        if np.ndim(wanted) == 0:
            raise ValueError(
                f"inducing_points is {wanted!r}. Expected how many, for instance 100, or where: an array (M, D); or None."
            )
        return as_tensor("inducing_points", self._scaled(np.asarray(wanted, dtype=np.float64)))

    def _posterior(self, model: GPModel, seed: int) -> Posterior:
        with warnings.catch_warnings():
            if not self.verbose:
                warnings.simplefilter("ignore", SamplingWarning)
            model = model if self.device is None else model.to(_found_device(self.device))
            return sample(model, self.method, num_samples=self.num_samples, seed=seed, progress=bool(self.verbose))

    def _warn_of(self, posteriors: Sequence[Posterior]) -> None:
        """Says once, and in short, what was kept quiet while sampling."""
        doubtful = [found for found in (posterior.complaints() for posterior in posteriors) if found]
        if doubtful and not self.verbose:
            which = "the draws" if len(posteriors) == 1 else f"those of {len(doubtful)} of {len(posteriors)} models"
            warn(
                f"{type(self).__name__}: {which} are not to be trusted. {doubtful[0][0]} verbose=True shows what was tried, and "
                f"posterior_ keeps all complaints."
            )

    def _inputs_like_trained(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        return self._scaled(validate_data(self, X, reset=False, dtype=np.float64))


class GPClassifier(ClassifierMixin, _Estimator):  # type: ignore[misc]
    """Gaussian process classification by Monte Carlo, with scikit-learn's interface.

    Probit links; class probabilities are averages over draws of hyperparameters and latent function. Complaints about the draws are
    kept: ``posterior_.complaints()``.

    Args:
        kernel: a gpytorch kernel with priors, on the scale of the inputs that the model sees; :func:`default_kernel` by default,
            its variance LogNormal(1.5, 1): where classes hardly overlap, f is large beside the probit link's unit.
        method: as :func:`torchgpmc.sample` takes it, which chooses by default.
        num_samples: as :func:`torchgpmc.sample` takes it: effective draws wanted, 400 by default; with a method draws, 1000.
        inducing_points: how many (by k-means), or where ``(M, D)``; by default none up to 500 data, and 100 beyond.
        normalize_x: whether columns are standardised first.
        multi_class: "one_vs_rest" (a binary model a class, probabilities normalised) or "softmax" (one model of all classes).
        random_state: as in scikit-learn.
        device: of the model; CPU by default.
        verbose: whether to show progress and warnings.

    Attributes:
        posterior_: the :class:`torchgpmc.Posterior`; for more than two classes one against the rest a list of them.
        classes_: labels.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> x, y = load_iris(return_X_y=True)
        >>> classifier = GPClassifier(num_samples=200, random_state=0).fit(x[40:110:2], y[40:110:2])
        >>> classifier.predict_proba(x[40:44]).shape, classifier.predict(x[[45, 75, 105]]).tolist()
        ((4, 3), [0, 1, 2])
    """

    def __init__(
        self,
        kernel: Kernel | None = None,
        *,
        method: Method | None = None,
        num_samples: int | None = None,
        inducing_points: Any = None,
        normalize_x: bool = True,
        multi_class: str = "one_vs_rest",
        random_state: Any = None,
        device: Any = None,
        verbose: bool = False,
    ):
        self.kernel = kernel
        self.method = method
        self.num_samples = num_samples
        self.inducing_points = inducing_points
        self.normalize_x = normalize_x
        self.multi_class = multi_class
        self.random_state = random_state
        self.device = device
        self.verbose = verbose

    def fit(self, X: Any, y: Any) -> GPClassifier:
        """Samples the posterior of inputs ``(N, D)`` and labels ``(N,)`` of any kind.

        Raises:
            ValueError: fewer than two classes, or another ``multi_class``.
        """
        if self.multi_class not in ("one_vs_rest", "softmax"):
            raise ValueError(f"multi_class is {self.multi_class!r}. Expected 'one_vs_rest' or 'softmax'.")
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y holds {len(self.classes_)} class. Expected at least two classes.")
        x, seed = self._fit_inputs(X), int(check_random_state(self.random_state).randint(2**31 - 1))
        if len(self.classes_) == 2:
            self.posterior_: Posterior | list[Posterior] = self._posterior(self._model(x, codes, Bernoulli(), seed), seed)
        elif self.multi_class == "softmax":
            likelihood = Softmax(num_classes=len(self.classes_))
            self.posterior_ = self._posterior(self._model(x, codes, likelihood, seed), seed)
        else:
            models = (self._model(x, codes == code, Bernoulli(), seed) for code in range(len(self.classes_)))
            self.posterior_ = [self._posterior(model, seed) for model in models]
        self._warn_of(self.posterior_ if isinstance(self.posterior_, list) else [self.posterior_])
        return self

    def _model(self, x: np.ndarray, codes: np.ndarray, likelihood: Any, seed: int) -> GPModel:
        kernel, inducing = self.kernel or default_kernel(x.shape[1], LogNormalPrior(1.5, 1.0)), self._inducing(x, seed)
        if inducing is None:
            return GP(x, codes, kernel, likelihood)
        return SparseGP(x, codes, kernel, likelihood, inducing_points=inducing)

    def predict_proba(self, X: Any) -> np.ndarray:
        """Class probabilities ``(T, classes)``, in the order of ``classes_``."""
        x = self._inputs_like_trained(X)
        if isinstance(self.posterior_, list):
            each = np.stack([posterior.predict(x).probs.cpu().numpy() for posterior in self.posterior_], -1)
            return each / each.sum(-1, keepdims=True)
        probs = self.posterior_.predict(x).probs.cpu().numpy()
        return probs if probs.ndim == 2 else np.stack([1 - probs, probs], -1)

    def predict(self, X: Any) -> np.ndarray:
        """The most probable labels ``(T,)``."""
        probs = self.predict_proba(X)
        return self.classes_[probs.argmax(-1)]


class GPRegressor(RegressorMixin, _Estimator):  # type: ignore[misc]
    """Gaussian process regression with Gaussian noise by Monte Carlo over hyperparameters, with scikit-learn's interface.

    Args:
        kernel: as for :class:`GPClassifier`, but for the variance by default: Gamma(2, 0.5).
        method: as :func:`torchgpmc.sample` takes it, which chooses by default.
        num_samples: as :func:`torchgpmc.sample` takes it: effective draws wanted, 400 by default; with a method draws, 1000.
        inducing_points: how many (by k-means), or where ``(M, D)``; by default none up to 500 data, and 100 beyond.
        normalize_x: whether columns are standardised first.
        normalize_y: whether targets are; the noise variance's prior is Gamma(1.1, 2) on that scale.
        random_state: as in scikit-learn.
        device: of the model; CPU by default.
        verbose: whether to show progress and warnings.

    Attributes:
        posterior_: the :class:`torchgpmc.Posterior`, of standardised targets if ``normalize_y``.

    Example:
        >>> x = np.linspace(0, 6, 20)[:, None]
        >>> regressor = GPRegressor(num_samples=200, random_state=0).fit(x, np.sin(x[:, 0]))
        >>> mean, deviation = regressor.predict(x[:3], return_std=True)
        >>> bool((abs(mean - np.sin(x[:3, 0])) < 4 * deviation).all())
        True
        >>> regressor.sample_y(x[:3], 100).shape
        (3, 100)
    """

    def __init__(
        self,
        kernel: Kernel | None = None,
        *,
        method: Method | None = None,
        num_samples: int | None = None,
        inducing_points: Any = None,
        normalize_x: bool = True,
        normalize_y: bool = True,
        random_state: Any = None,
        device: Any = None,
        verbose: bool = False,
    ):
        self.kernel = kernel
        self.method = method
        self.num_samples = num_samples
        self.inducing_points = inducing_points
        self.normalize_x = normalize_x
        self.normalize_y = normalize_y
        self.random_state = random_state
        self.device = device
        self.verbose = verbose

    def fit(self, X: Any, y: Any) -> GPRegressor:
        """Samples the posterior of inputs ``(N, D)`` and real targets ``(N,)``."""
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        x, seed = self._fit_inputs(X), int(check_random_state(self.random_state).randint(2**31 - 1))
        y = np.asarray(y, dtype=np.float64)
        check_squarable("y", as_tensor("y", y))
        spread = float(y.std())
        self._center, self._spread = (float(y.mean()), spread if spread > 0 else 1.0) if self.normalize_y else (0.0, 1.0)
        targets = (y - self._center) / self._spread
        kernel, inducing = self.kernel or default_kernel(x.shape[1], GammaPrior(2.0, 0.5)), self._inducing(x, seed)
        likelihood = GaussianLikelihood(noise_prior=GammaPrior(1.1, 2.0))
        if inducing is None:
            model: GPModel = GPRegression(x, targets, kernel, likelihood)
        else:
            model = SparseGP(x, targets, kernel, likelihood, inducing_points=inducing)
        self.posterior_ = self._posterior(model, seed)
        self._warn_of([self.posterior_])
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Posterior means ``(T,)`` of the response; with ``return_std`` its standard deviations too, noise included."""
        x = self._inputs_like_trained(X)
        prediction = self.posterior_.predict(x)
        mean = self._center + self._spread * prediction.mean.cpu().numpy()
        return (mean, self._spread * prediction.variance.sqrt().cpu().numpy()) if return_std else mean

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Draws of the response ``(T, n_samples)``, noise included; each is of all T points together."""
        x, seed = self._inputs_like_trained(X), int(check_random_state(random_state).randint(2**31 - 1))
        draws = self.posterior_.predict(x).sample(n_samples, seed=seed, joint=True)
        return self._center + self._spread * draws.cpu().numpy().T
