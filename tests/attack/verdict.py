"""One model attacked: exact comparisons of density, latents and predictions, and comparisons of chance of means and evidence."""

import itertools
import warnings
from typing import NamedTuple

import numpy as np
import scipy.special
import scipy.stats
import torch

import torchgpmc as tg
from tests.attack.engines import engines_for
from tests.attack.problem import random_problem
from tests.attack.reference import reference
from torchgpmc.storage.draws import Draws

REFERENCE_DRAWS = 10_000
LEAST_EFFECTIVE_SIZE = 300
LARGEST_SHARE = 0.03
LARGEST_RHAT = 1.3
EXACT = {torch.float64: 1e-8, torch.float32: 2e-3}
PREDICTION = {torch.float64: 1e-6, torch.float32: 1e-3}


class Comparison(NamedTuple):
    """A quantity by an engine and by brute force; ``tail`` is the probability of a larger gap, had both the same mean."""

    model: int
    engine: str
    quantity: str
    score: float
    tail: float
    warned: bool


class Error(NamedTuple):
    """A comparison without chance that failed, or an engine that raised."""

    model: int
    engine: str
    text: str


class Result(NamedTuple):
    """What attacks found; ``unjudged`` lists models for which brute force was too weak."""

    comparisons: list[Comparison]
    errors: list[Error]
    unjudged: list[int]
    runs: int
    warned_runs: int

    def __add__(self, other):
        return Result(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


NOTHING = Result([], [], [], 0, 0)


class Estimate(NamedTuple):
    """A mean ``(Q,)``, its standard error and how many degrees of freedom that has."""

    mean: np.ndarray
    error: np.ndarray
    degrees: np.ndarray


def estimate(values, log_weights=None, chains=1):
    """Weighted means of ``(S, Q)`` with their errors: of chains, which run apart, by the spread of what each contributes.

    An error from few effective draws is itself uncertain: a tenth of them are its degrees of freedom.
    """
    count = len(values)
    weights = np.full(count, 1.0) if log_weights is None else np.exp(log_weights - scipy.special.logsumexp(log_weights)) * count
    mean = (weights[:, None] * values).mean(0)
    terms = weights[:, None] * (values - mean)
    if chains > 1:
        terms = terms.reshape(chains, -1, terms.shape[-1]).mean(1)
    kish = (weights.mean() ** 2 / (weights**2).mean()) * count / 10
    degrees = min(kish, chains - 1) if chains > 1 else kish
    return Estimate(mean, terms.std(0, ddof=1) / len(terms) ** 0.5, np.full(values.shape[1], max(degrees, 2.0)))


def compare(first, second):
    """Scores and tail probabilities (Welch's t) of two estimates."""
    squares = first.error**2, second.error**2
    scale = np.sqrt(squares[0] + squares[1]).clip(1e-12)
    score = (first.mean - second.mean) / scale
    degrees = scale**4 / (squares[0] ** 2 / first.degrees + squares[1] ** 2 / second.degrees).clip(1e-300)
    return score, 2 * scipy.stats.t.sf(np.abs(score), degrees)


class Quantities:
    """Bounded functions of (theta, v) on the reference's scale: of each hyperparameter, of f at the data and of log p(y | f)."""

    def __init__(self, problem, draws):
        self.problem = problem
        raw, self.names = self.raw(draws.theta, draws.v)
        weights = np.exp(draws.log_weights - scipy.special.logsumexp(draws.log_weights))
        self.centre = weights @ raw
        self.scale = np.sqrt(weights @ (raw - self.centre) ** 2).clip(1e-6)

    def raw(self, theta, v):
        problem = self.problem
        values, _ = problem.unpack(theta)
        latents = problem.latents(values)
        f = problem.functions(latents, v).reshape(len(theta), -1)
        fit = problem.likelihood.log_density(problem.functions(latents, v), problem.y, values["likelihood"]).sum(-1)
        names = [f"theta {i}" for i in range(theta.shape[1])] + [f"f {i}" for i in range(f.shape[1])] + ["log p(y | f)"]
        return np.concatenate([theta, f, fit[:, None]], 1), names

    def __call__(self, theta, v):
        standard = (self.raw(theta, v)[0] - self.centre) / self.scale
        return np.concatenate([np.tanh(standard), np.tanh(standard) ** 2], 1)

    @property
    def labels(self):
        return [f"mean of {name}" for name in self.names] + [f"spread of {name}" for name in self.names]


def attack(index, num_engines=None, names=None, leave_out=()):
    """Model ``index`` by some engines (drawn with its seed; all by default), or those ``names``, none that are left out."""
    try:
        problem = random_problem(index)
    except Exception as error:  # whatever a model may raise when it is made is a finding
        return NOTHING._replace(errors=[Error(index, "construction", describe(error))])
    rng = np.random.default_rng((7, index))
    errors = joint_errors(problem, rng)
    engines = engines_for(problem)
    chosen = [name for name in engines if name not in leave_out and (names is None or name in names)]
    if num_engines is not None:
        chosen = drawn(rng, engines, chosen, num_engines, index % 3 == 1)
    if not chosen:
        return NOTHING._replace(errors=errors)
    truth = reference(problem, rng, REFERENCE_DRAWS)
    largest = np.exp(truth.log_weights.max() - scipy.special.logsumexp(truth.log_weights))
    judged = truth.effective_size >= LEAST_EFFECTIVE_SIZE and largest <= LARGEST_SHARE
    result = Result([], errors, [] if judged else [index], 0, 0)
    quantities = Quantities(problem, truth)
    expected = estimate(quantities(truth.theta, truth.v), truth.log_weights)
    for name in chosen:
        result = result + against(problem, name, engines[name], truth if judged else None, quantities, expected)
    return result


def drawn(rng, engines, names, count, begin):
    """``count`` of the names, weighted draws and chains in turn, chains first if ``begin``."""
    by_kind = [[], []]
    for name in rng.permutation(names):
        by_kind[(engines[name].num_chains is not None) ^ begin].append(name)
    in_turn = [name for pair in itertools.zip_longest(*by_kind) for name in pair if name is not None]
    return in_turn[:count]


def describe(error):
    return f"{type(error).__name__}: {error}"[:400]


def joint_errors(problem, rng):
    """The joint log density, constant apart, and its gradient along a random direction, at eight points."""
    prior = problem.draw_theta(rng, 8)
    position = np.concatenate([prior, rng.standard_normal((8, problem.latent_size))], -1)
    expected = problem.log_joint(position, precise=True)
    if not position.shape[1]:
        return []
    try:
        density = tg.joint_log_density(problem.model)
        there = torch.tensor(position, dtype=problem.dtype)
        value, gradient = (part.detach().double().numpy() for part in density.value_and_grad(there))
        plain = density(there).detach().double().numpy()
    except Exception as error:
        return [Error(problem.index, "joint density", describe(error))]
    finite = np.isfinite(expected)
    if not np.array_equal(finite, np.isfinite(value)):
        if problem.dtype == torch.float32:
            finite &= np.isfinite(value)
        else:
            return [Error(problem.index, "joint density", f"{value} where {expected} is right")]
    if not finite.any():
        return []
    tolerance = EXACT[problem.dtype] * (1 + np.abs(expected[finite]).max())
    if problem.kind is tg.SparseGP:
        tolerance += problem.likelihood.promise * problem.y.shape[-1]
    found = []
    gap = value[finite] - expected[finite]
    if np.ptp(gap) > tolerance or not np.allclose(
        plain[finite], value[finite], rtol=EXACT[problem.dtype], atol=EXACT[problem.dtype]
    ):
        found.append(Error(problem.index, "joint density", f"off by {np.ptp(gap):.3g} between points, tolerance {tolerance:.1g}"))
    direction = rng.standard_normal(position.shape[1])
    slopes = (gradient @ direction)[finite]
    expected_slopes, doubt = slope_along(lambda x: problem.log_joint(x, precise=True), position[finite], direction)
    room = 100 * EXACT[problem.dtype] * (1 + np.abs(expected[finite]) + np.abs(expected_slopes)) + 10 * doubt
    if (np.abs(slopes - expected_slopes) > room).any():
        found.append(Error(problem.index, "gradient", f"{slopes} where {expected_slopes} is right"))
    return found


def slope_along(function, position, direction, step=1e-3):
    """Central differences extrapolated twice, and what the second changed: kinks and steep places are left in doubt."""
    slopes = [
        (function(position + h * direction) - function(position - h * direction)) / (2 * h) for h in (4 * step, 2 * step, step)
    ]
    once = [(4 * fine - coarse) / 3 for coarse, fine in itertools.pairwise(slopes)]
    twice = (16 * once[1] - once[0]) / 15
    return twice, np.abs(twice - once[1]) + np.abs(once[1] - once[0])


def against(problem, name, engine, truth, quantities, expected):
    """One engine's run, held against brute force (only in what is exact where that is too weak: ``truth`` is None)."""
    index = problem.index
    options = {} if engine.num_chains is None else {"num_chains": engine.num_chains, "warmup_steps": engine.warmup_steps}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            posterior = tg.sample(
                problem.model, engine.method, num_samples=engine.num_samples, seed=index, progress=False, **options
            )
            errors = [Error(index, name, text) for text in posterior_errors(problem, posterior)]
    except Exception as error:
        return Result([], [Error(index, name, describe(error))], [], 1, 0)
    warned = doubtful(posterior)
    if truth is None:
        return Result([], errors, [], 1, warned)
    log_weights = None if posterior.log_weights is None else posterior.log_weights.double().flatten().numpy()
    theta, v = (part.double().flatten(0, 1).numpy() for part in (posterior.theta, posterior.whitened))
    found = estimate(quantities(theta, v), log_weights, posterior.num_chains)
    comparisons = [
        Comparison(index, name, label, float(score), float(tail), warned)
        for label, score, tail in zip(quantities.labels, *compare(found, expected), strict=True)
    ]
    if "log_evidence" in posterior.info:
        score, tail = compare(evidence(posterior, found), of_brute_force(truth))
        comparisons.append(Comparison(index, name, "log evidence", float(score[0]), float(tail[0]), warned))
    return Result(comparisons, errors, [], 1, warned)


def doubtful(posterior):
    """Whether the run itself warns; of forty short chains not because they are short, but if they hardly mix."""
    worst = max((row.rhat for row in posterior.summary().rows if np.isfinite(row.rhat)), default=1.0)
    short = ("effective draws",) if worst > LARGEST_RHAT else ("effective draws", "R-hat")
    return any(not any(word in complaint for word in short) for complaint in posterior.complaints())


def evidence(posterior, means):
    error = posterior.info.get("log_evidence_error", 1e-2)
    return Estimate(np.array([posterior.info["log_evidence"]]), np.array([error]), means.degrees[:1])


def of_brute_force(truth):
    value, error = truth.log_evidence()
    return Estimate(np.array([value]), np.array([error]), np.array([truth.effective_size / 10]))


def posterior_errors(problem, posterior, num_draws=10):
    """Latents, log densities and predictive densities of some draws, by formula."""
    tolerance = PREDICTION[problem.dtype]
    # Given the latents that were kept first: averages over more of them, or over all there are, have tests of their own.
    one = tg.Posterior(posterior.model, Draws(posterior.theta, posterior.whitened, posterior.log_weights), posterior.stats, {})
    one.model.is_conjugate = False
    rows = one._spaced(num_draws).numpy()  # of draws that weigh something
    num_draws = len(rows)
    theta, v = (part.double().flatten(0, 1).numpy()[rows] for part in (posterior.theta, posterior.whitened))
    weights = np.zeros(num_draws) if posterior.log_weights is None else posterior.log_weights.double().flatten().numpy()[rows]
    found = []
    if problem.inducing is None:
        values, _ = problem.unpack(theta)
        expected = problem.functions(problem.latents(values), v).reshape(num_draws, -1)
        latents = posterior.latents.double().flatten(0, 1).flatten(1).numpy()[rows]
        if not np.allclose(latents, expected, rtol=tolerance, atol=tolerance):
            found.append(f"latents off by {np.abs(latents - expected).max():.3g}")
    prediction = one.predict(torch.tensor(problem.test_x), num_draws=num_draws)
    expected = scipy.special.logsumexp(
        problem.predictive_log_densities(theta, v) + scipy.special.log_softmax(weights)[:, None], axis=0
    )
    got = prediction.log_prob(torch.tensor(problem.test_y)).double().numpy()
    if not np.allclose(got, expected, rtol=tolerance, atol=tolerance):
        found.append(f"predictive log densities {got} where {expected} is right")
    return found
