"""The default call's means and predictions beside a long run of another engine, for models of the fifth set.

    python benchmarks/beside_long_runs.py [t_noise_ard imbalanced_alike ...] [--seconds 400] [--folder FOLDER] [--no-call]

Quoted by docs/results/other_data.md, "Beside long runs of other engines". The long run's engine shares as little as can be with
the one that serves; it ends after so many CPU seconds, warm-up included. Means are of hyperparameters on their unconstrained scale,
gaps in the long run's posterior deviations, errors from effective sizes. Draws are kept in the folder, if one is given.
"""

import argparse
import pathlib
import signal
import time
import warnings

import torch
from default_call import means
from unseen import CASES
from written_apart import Student, gibbs, of_noise

import torchgpmc as tg
from torchgpmc.diagnostics.summaries import effective_sizes
from torchgpmc.diagnostics.weights import weighted_effective_size
from torchgpmc.storage.draws import Draws

_MOST_DRAWS = 6000  # a chain
_MANY_CHAINS = 12
_POINTS, _PREDICTING = 60, 1500  # training rows and as many middles of two; draws of half a run

# Theta given the latents and given white ones; of vehicle_like NUTS on both takes four seconds a transition.
_SWEEPS = tg.Gibbs(latent=tg.HMC(num_steps=12, least_steps=6), hyper_steps=2, latent_steps=2)
# Warm-up follows EP's evidence: Laplace's is a hundred nats too high elsewhere.
_PROBITS = tg.PseudoMarginal(tg.EP(), evidence=tg.evidence.SmoothProbit(tg.EP(), 256), independent_share=0.9)
_ON_PRIOR_SCALE = tg.HMC(num_steps=7, least_steps=4, normal_scale=True)
# Engine, chains and warm-up.
LONG = {
    "imbalanced_alike": (_PROBITS, 16, 80),
    "imbalanced": (_PROBITS, 16, 80),
    "vehicle_like": (_SWEEPS, 4, 250),
    "three_of_eighteen": (_SWEEPS, 4, 250),
    "regression_of_sixty": (_ON_PRIOR_SCALE, 4, 100),
}


def _interrupt(*_):
    raise KeyboardInterrupt


def _limit(seconds):
    """Ends a run, as Ctrl-C does, after so many CPU seconds; 0: no more."""
    signal.signal(signal.SIGPROF, _interrupt)
    signal.setitimer(signal.ITIMER_PROF, seconds)


def of_scales(model, seconds):
    """Draws by :func:`written_apart.gibbs`, as a posterior."""
    priors = {"outputscale": (2.0, 0.15), "lengthscale": (3.0, 3.0), "degrees": (2.0, 0.1), "noise": (1.1, 0.5)}
    student = Student(model.train_x, model.train_y, **priors)
    theta, f = gibbs(student, seconds)
    flat, white = f.flatten(0, 1)[..., None], []
    for rows, part in zip(theta.flatten(0, 1).split(50), flat.split(50), strict=True):
        white.append(torch.linalg.solve_triangular(model.prior(rows).factor, part, upper=False))
    log_likelihood = torch.stack(
        [student.of_residuals(one, model.train_y - at) for one, at in zip(theta[..., -2:], f, strict=True)]
    )
    draws = Draws(theta, torch.cat(white).view_as(f), None)
    return tg.Posterior(model, draws, {"lp": log_likelihood}, {"method": "written_apart.gibbs"})


def of_latent_noise(model, seconds):
    """Chains on a density written apart, as a posterior."""
    x, y, columns = model.train_x, model.train_y, model.train_x.shape[1]
    density = of_noise(x, y, 0.3, lengthscale=(0.7, 0.7), outputscale=(2.0, 0.5))
    generator = torch.Generator().manual_seed(9)
    start = 0.5 * torch.randn(_MANY_CHAINS, 1 + columns + len(y), generator=generator, dtype=y.dtype)
    _limit(seconds)
    options = {"num_samples": _MOST_DRAWS, "warmup_steps": 200, "seed": 9, "progress": False}
    chains = tg.sample_density(density, start, tg.HMC(num_steps=16, least_steps=6), **options)
    _limit(0)
    theta, white = chains.position.split([1 + columns, len(y)], -1)
    whitened = []
    for rows, of_noises in zip(theta.flatten(0, 1).split(100), white.flatten(0, 1).split(100), strict=True):
        factor = model.prior(rows).factor  # f given the noise, by Matheron's rule
        noise = 0.3 * (factor @ of_noises[..., None]).exp()
        own, errors = torch.randn((2, *noise.shape), generator=generator, dtype=y.dtype)
        gap = y[:, None] - factor @ own - noise * errors
        total = torch.linalg.cholesky(factor @ factor.mT + torch.diag_embed(noise.squeeze(-1).square()))
        of_means = own + factor.mT @ torch.cholesky_solve(gap, total)
        whitened.append(torch.cat([of_means.squeeze(-1), of_noises], -1))
    draws = Draws(theta, torch.cat(whitened).view(*theta.shape[:2], -1), None)
    return tg.Posterior(model, draws, {"lp": chains.stats["lp"]}, {"method": "HMC on a density written apart"})


_APART = {"t_noise_ard": of_scales, "noise_by_column": of_latent_noise}


def long_run(name, model, seconds, checkpoint):
    """Draws of the other engine until so many CPU seconds are spent; the next run goes on where this one ends."""
    if name in _APART:
        return _APART[name](model, seconds)
    method, num_chains, warmup_steps = LONG[name]
    _limit(seconds)
    options = {
        "num_samples": _MOST_DRAWS,
        "warmup_steps": warmup_steps,
        "num_chains": num_chains,
        "checkpoint": checkpoint,
    }
    posterior = tg.sample(model, method, seed=9, progress=False, **options)
    _limit(0)
    return posterior


def errors(posterior):
    """Of the means of :func:`means`, by effective sizes."""
    _, deviation = means(posterior)
    if posterior.log_weights is None:
        sizes = [effective_sizes(posterior.theta[..., i])[0] for i in range(posterior.theta.shape[-1])]
    else:
        sizes = [weighted_effective_size(column, posterior.log_weights) for column in posterior.theta.unbind(-1)]
    return deviation / torch.tensor(sizes, dtype=deviation.dtype).sqrt()


def halves(posterior):
    """Two of half the draws, or chains, and each one's share of the weight."""
    chains, draws = posterior.num_chains, posterior.num_draws
    weights = torch.softmax(posterior._log_weights(), 0).view(chains, draws)
    rows = torch.arange(chains * draws).view(chains, draws)
    parts = (rows[:, ::2], rows[:, 1::2]) if chains == 1 else (rows[::2], rows[1::2])

    def some(values, part):
        return None if values is None else values.flatten(0, 1)[part]

    found = []
    for part in parts:
        kept = (posterior.theta, posterior.whitened, posterior.log_weights)
        chosen = Draws(*(some(values, part) for values in kept), further_whitened=some(posterior._further, part))
        stats = {name: some(values, part) for name, values in posterior.stats.items()}
        found.append((tg.Posterior(posterior.model, chosen, stats, posterior.info), float(weights.flatten()[part].sum())))
    return found


def predicted(posterior, x):
    """Probabilities or means by all draws, how far those of halves are apart, and what gaps are measured in."""
    is_label = posterior.model.num_latents > 2 or set(posterior.model.train_y.unique().tolist()) <= {0.0, 1.0}
    values, scale = [], 1.0
    for half, share in halves(posterior):
        prediction = half.predict(x, num_draws=_PREDICTING)
        values.append((prediction.probs if is_label else prediction.mean, share))
        scale = 1.0 if is_label else prediction.variance.sqrt()
    (one, share), (other, rest) = values
    return share * one + rest * other, (one - other).abs() / 2, scale


def points(model):
    """Training rows, and middles of pairs of them."""
    x = model.train_x[: 2 * _POINTS]
    half = len(x) // 2
    return torch.cat([x[:half], 0.5 * (x[:half] + x[half : 2 * half])])


def compared(model, call, longer):
    """Lines on hyperparameters and predictions."""
    (mean, _), (target, deviation) = means(call), means(longer)
    gap = ((mean - target) / deviation).abs()
    own, other = errors(call) / deviation, errors(longer) / deviation
    in_errors = gap / (own.square() + other.square()).sqrt()
    rows = [(one, row) for one, row in zip(call.summary(), longer.summary(), strict=True) if row.name != "lp"]
    for i, (one, row) in enumerate(rows):
        both = f"{one.mean:.4g} ({one.sd:.3g}), long run {row.mean:.4g} ({row.sd:.3g}), R-hat {row.rhat:.3f}"
        print(f"  {row.name}: {both}; off {gap[i]:.3f} sd, errors {own[i]:.3f} and {other[i]:.3f}, {in_errors[i]:.1f} of both")
    worst, strangest = int(gap.argmax()), int(in_errors.argmax())
    print(f"{len(rows)} means, worst {gap[worst]:.3f} sd ({rows[worst][1].name}, {in_errors[worst]:.1f} errors)")
    square = in_errors.square().mean().sqrt()
    print(f"at most {in_errors[strangest]:.1f} errors ({rows[strangest][1].name}), root mean square {square:.2f}", flush=True)
    x = points(model)
    (one, own_error, _), (two, error, scale) = predicted(call, x), predicted(longer, x)
    off, own_error, error = ((values / scale).abs() for values in (one - two, own_error, error))
    by_halves = f"by halves the call's own error is at most {own_error.max():.4f}, the long run's {error.max():.4f}"
    print(f"predictions: off at most {off.max():.4f}, root mean square {off.square().mean().sqrt():.4f}; {by_halves}", flush=True)


def report(name, options):
    """The call, the long run and how far they are apart."""
    model, kept = CASES[name](), options.folder
    print(f"== {name}", flush=True)
    files = {part: None if kept is None else kept / f"{name}_{part}.pt" for part in ("call", "long")}
    posteriors = {}
    for part in ("call", "long"):
        if files[part] is not None and files[part].exists():
            posteriors[part] = tg.Posterior.load(files[part], model)
            continue
        if part == "call" and options.no_call:
            continue
        began = time.process_time()
        found = posteriors[part] = (
            tg.sample(model, seed=0, progress=False)
            if part == "call"
            else long_run(name, model, options.seconds, None if kept is None else kept / f"{name}_steps.pt")
        )
        seconds = time.process_time() - began
        tried = [trial["engine"] for trial in found.info["tried"]] if part == "call" else [found.info["method"]]
        rows = [row.rhat for row in found.summary()]
        print(
            f"{part}: {' -> '.join(tried)}, {seconds:.1f} CPU s, {found.num_chains} x {found.num_draws}, "
            f"effective {found.effective_size():.0f}, R-hat {max(rows):.3f}; {found.verdict()}",
            flush=True,
        )
        if files[part] is not None:
            found.save(files[part])
    if len(posteriors) == 2:
        compared(model, posteriors["call"], posteriors["long"])
    else:
        print(posteriors["long"].summary(), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[*_APART, *LONG])
    parser.add_argument("--seconds", type=float, default=400.0, help="CPU seconds of a long run")
    parser.add_argument("--folder", type=pathlib.Path, help="where draws are kept")
    parser.add_argument("--no-call", action="store_true", help="long runs alone")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chosen = parser.parse_args()
    for name in chosen.names:
        report(name, chosen)
