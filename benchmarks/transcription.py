"""Gene transcription (paper C, section 1.7; figure 1.6): calibration on simulated data; p53 and LexA by several samplers.

    python benchmarks/transcription.py --data FOLDER --pieces POSTERIORS [--scale 1.0] [--output docs/results/transcription.md]

Each piece is a run of its own; what a piece gave is kept in POSTERIORS (JSON, and its draws), and a second call makes those that
are missing and writes the table of all that are there. ``--scale`` multiplies draws and warm-up; ``--only`` takes pieces by name;
``--figure FILE`` draws figure 1.6. An interrupt (SIGINT) ends a sampler's piece at the draws that it has; ``--only`` with its name
goes on from there.

Simulated: twenty data sets from the prior, each with eight chains that begin at the truth; ranks of the truth among draws, and the
share of it within 95 % bands. p53: five genes, three replicates, measured variances, log f(0) = -5, a grid of 121 points, 8 chains.
LexA: 14 genes that it represses, one replicate, a sampled variance a gene, free starts, a lengthscale above the shortest time
between measurements, as in the authors' later code. NUTS begins around the mode of all unknowns (``tg.initialize``), "NUTS
again" around the normal density with the moments of NUTS's draws. Sweeps of p53 move hyperparameters along that one
(``tg.Regressed``); LexA's the lengthscale given noisy latents, each gene along its ridges, and the level of f with what takes
it back. They begin at draws of NUTS's (the second's, where there are any), two chains each at those with the lowest and the
highest twentieth of a gene's decay rate. Speed: the paper's own sweep, a random walk of the lengthscale, one of each gene's
kinetics, and one move of the log concentrations. Modes: of LexA's [theta, v], decay rates along the ridges, by L-BFGS from
starts at two and four deviations of the fit, and from the prior.
"""

import argparse
import csv
import gzip
import itertools
import json
import math
import signal
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import RBFKernel
from gpytorch.priors import LogNormalPrior
from transcription_report import CHAINS, DATA_SETS, draw_figure, text_of

import torchgpmc as tg
from torchgpmc.diagnostics.summaries import effective_sizes
from torchgpmc.likelihoods import Activation, Repression, Transcription
from torchgpmc.models.latents import likelihood_values
from torchgpmc.models.ridges import StraightDensity, ridges_of
from torchgpmc.numerics.ascent import ascend

THINNING = 4
PRECISION = 2.0  # of the noise that LexA's lengthscale is moved given
BATCHES = 8, 32  # chains whose sweeps are timed


def sweeps(latent, steps, thinning=THINNING):
    """Moves of the log concentrations, and of all hyperparameters along the fit, or gene by gene: from a fit to the method."""

    def method(start, gene_by_gene=False):
        options = {"latent": latent, "latent_steps": steps, "thinning": thinning}
        if not gene_by_gene:
            return tg.Gibbs(hyper=tg.HMC(num_steps=8), parameterization=tg.Regressed(start), **options)
        held = tg.Surrogate(precision=PRECISION)
        return tg.Gibbs(
            tg.AdaptiveMH(), parameterization=held, hyper_steps=5, parts=tg.HMC(num_steps=12), invariance_steps=1, **options
        )

    return method


CONTROLS = tg.ControlVariables(target_accept_prob=0.15)
LATENTS = {"control variables": CONTROLS, "elliptical slice": tg.EllipticalSlice(), "aGrad": tg.AuxiliaryGradient()}
SAMPLERS = {
    "NUTS": lambda *_: tg.NUTS(max_tree_depth=8),
    "NUTS again": lambda *_: tg.NUTS(max_tree_depth=8),
    "control variables": sweeps(CONTROLS, 4),
    "elliptical slice": sweeps(LATENTS["elliptical slice"], 15),
    "aGrad": sweeps(LATENTS["aGrad"], 10),
}
# Warm-up and draws of each; what moves more slowly is longer.
LENGTHS = {
    "p53": {
        "NUTS": (300, 1500),
        "NUTS again": (100, 1500),
        "control variables": (150, 1000),
        "elliptical slice": (150, 1200),
        "aGrad": (150, 1000),
    },
    "LexA": {
        "NUTS": (300, 9000),
        "NUTS again": (200, 3000),
        "control variables": (250, 2500),
        "elliptical slice": (250, 3000),
        "aGrad": (250, 2500),
    },
}


def lengthscale_prior(grid):
    """The paper's authors': the log of the squared lengthscale has the variance 2, about 3/16 of the time that is observed."""
    return LogNormalPrior(math.log(1.5 * float(grid[-1] - grid[0]) / 8), math.sqrt(0.5))


def p53_model(folder):
    with gzip.open(Path(folder) / "p53.csv.gz", "rt") as file:
        rows = list(csv.DictReader(file))
    column = lambda name: torch.tensor([float(row[name]) for row in rows], dtype=torch.float64).view(5, 3, 7).transpose(0, 1)  # noqa: E731
    grid = torch.linspace(0, 12, 121, dtype=torch.float64)
    times = torch.arange(0, 13, 2, dtype=torch.float64)
    return model_of(grid, times, column("y").contiguous(), column("var").contiguous(), lengthscale_prior(grid), known=-5.0)


def lexa_model(folder):
    with gzip.open(Path(folder) / "ecoli_lexa.csv.gz", "rt") as file:
        y = torch.tensor([float(row["y"]) for row in csv.DictReader(file)], dtype=torch.float64).view(1, 14, 6)
    grid = torch.linspace(0, 60, 121, dtype=torch.float64)
    times = torch.tensor([0, 5, 10, 20, 40, 60], dtype=torch.float64)
    likelihood = Transcription(grid, times, num_genes=14, num_replicates=1, response=Repression(), free_initial=True)
    constraint = GreaterThan(float(times.diff().min()))
    return tg.GP(grid, y, RBFKernel(lengthscale_prior=lengthscale_prior(grid), lengthscale_constraint=constraint), likelihood)


EXPERIMENTS = {"p53": p53_model, "LexA": lexa_model}
GENE_BY_GENE = {"p53": False, "LexA": True}  # whose f is free at the start, so that its level is not seen


def model_of(grid, times, y, variances, lengthscale_prior, known):
    replicates, genes, _ = y.shape
    likelihood = Transcription(grid, times, num_genes=genes, num_replicates=replicates, response=Activation(), variances=variances)
    kernel = RBFKernel(lengthscale_prior=lengthscale_prior)
    return tg.ConditionedGP(grid, y, kernel, likelihood, known_inputs=grid[:1], known_values=torch.tensor([known]))


def simulated_model():
    """Of a size at which twenty posteriors take minutes: four genes, one replicate, seven times."""
    grid = torch.linspace(0, 12, 25, dtype=torch.float64)
    times = grid[::4]
    y = torch.ones(1, 4, len(times), dtype=torch.float64)
    return model_of(grid, times, y, torch.full_like(y, 0.02), LogNormalPrior(math.log(2.5), 0.5), known=-1.0)


def simulated(_, scale):
    """Ranks of the true decay rates and log concentrations among nine draws, and the share within 95 % bands."""
    made, generator = simulated_model(), torch.Generator().manual_seed(3)
    theta = made.layout.sample_prior(2 * DATA_SETS, generator)
    v = torch.randn(2 * DATA_SETS, made.latent_size, generator=generator, dtype=torch.float64)
    prior = made.prior(theta)
    f = made.latents(prior, v)
    y = made.likelihood_function(likelihood_values(prior), lambda likelihood: likelihood.sample(f, generator))
    decay = made.layout.constrain(theta)["likelihood.decay"]
    draws, warm_up = int(200 * scale), int(60 * scale)
    began = time.process_time()
    found: dict[str, list[dict[str, Any]]] = {"decay rates": [], "log concentrations": []}
    without_fit = 0
    for number in range(len(y)):
        try:
            start = tg.initialize(made.with_targets(y[number]), progress=False)
        except ValueError:  # no mode: known from the data alone, given which ranks are uniform all the same
            without_fit += 1
            continue
        truth = torch.cat([theta[number], v[number]]).expand(CHAINS, -1)
        method = At(sweeps(LATENTS["aGrad"], 10, thinning=1)(start), truth)
        posterior = tg.sample(
            start.model, method, num_samples=draws, warmup_steps=warm_up, num_chains=CHAINS, seed=number, progress=False
        )
        found["decay rates"].append(judged(posterior.samples["likelihood.decay"], decay[number]))
        found["log concentrations"].append(judged(posterior.latents[..., 4::4], f[number, 4::4]))
        if len(found["decay rates"]) == DATA_SETS:
            break
    result = {"seconds": time.process_time() - began, "draws": draws, "warm_up": warm_up, "without_fit": without_fit}
    return result | {name: together(judgements) for name, judgements in found.items()}


def judged(drawn, truth):
    """Of one data set: whether 95 % bands of draws ``(C, S, Q)`` hold the truth ``(Q,)``, and its ranks among nine of them."""
    flat = drawn.flatten(0, 1)
    low, high = (torch.quantile(flat, level, 0) for level in (0.025, 0.975))
    nine = flat[torch.linspace(drawn.shape[1] - 1, len(flat) - 1, 9).long()]  # of several chains, far from the truth they began at
    return {
        "covered": float(((low < truth) & (truth < high)).double().mean()),
        "ranks": (nine < truth).sum(0).tolist(),
        "size": min(effective_sizes(drawn[..., q])[0] for q in range(drawn.shape[-1])),
    }


def together(judgements):
    """Of all data sets; t statistics of each data set's mean rank and of its mean distance from the middle rank."""
    ranks = torch.tensor([row["ranks"] for row in judgements]).double()
    expected = {"place": (ranks, 4.5), "spread": ((ranks - 4.5).abs(), 2.5)}
    scores = {
        name: float((values.mean(1) - mean).mean() / values.mean(1).std() * len(values) ** 0.5)
        for name, (values, mean) in expected.items()
    }
    return {
        "covered": sum(row["covered"] for row in judgements) / len(judgements),
        "ranks": torch.bincount(ranks.flatten().long(), minlength=10).tolist(),
        "size": min(row["size"] for row in judgements),
        **scores,
    }


def speed(data, scale):
    """Chain-sweeps a second of the paper's sweep after its warm-up, latents by each of their moves, in turns: medians of three."""
    start, draws = tg.initialize(p53_model(data), progress=False), int(100 * scale)
    found: dict[str, list[list[float]]] = {name: [[] for _ in BATCHES] for name in LATENTS}
    for seed, (number, chains), (name, latent) in itertools.product(range(3), enumerate(BATCHES), LATENTS.items()):
        method, taken = tg.Gibbs(latent=latent, parameterization=tg.Ancillary(), latent_steps=1), []
        for kept in (1, 1 + draws):
            began = time.process_time()
            run = {"num_samples": kept, "warmup_steps": 40, "num_chains": chains, "seed": seed, "progress": False}
            tg.sample(start.model, method, start=start, **run)
            taken.append(time.process_time() - began)
        found[name][number].append(chains * draws / (taken[1] - taken[0]))
    return {"sweeps": {name: [sorted(rates)[1] for rates in batches] for name, batches in found.items()}}


def modes(data, scale):
    """Of LexA, each with its log density, the log of the mass that its curvature gives it, and how many searches ended there."""
    began, generator = time.process_time(), torch.Generator().manual_seed(5)
    start = tg.initialize(lexa_model(data), progress=False)
    model, count = start.model, int(7 * scale)
    ridges = ridges_of(model)
    density = StraightDensity(tg.joint_log_density(model), ridges)
    positions = []
    for width in (2.0, 4.0):
        noise = torch.randn(count, model.layout.size, generator=generator, dtype=torch.float64)
        theta = start.theta + width * noise @ torch.linalg.cholesky(start.theta_covariance).mT
        w = torch.randn(count, model.latent_size, generator=generator, dtype=torch.float64)
        positions.append(torch.cat([ridges.straight(theta), start.white_coordinates().latents(theta, w)], -1))
    theta = model.layout.sample_prior(count, generator)
    v = 0.5 * torch.randn(count, model.latent_size, generator=generator, dtype=torch.float64)
    positions.append(torch.cat([ridges.straight(theta), v], -1))
    searches = [ascend(density, position, bound=12.0, max_iterations=6000, slope=1e-3) for position in torch.cat(positions)]
    found: list[dict[str, Any]] = []
    for search in sorted((search for search in searches if search), key=lambda search: -search.log_density):
        if found and found[-1]["log_density"] - search.log_density < 0.05:  # as near as searches end to one maximum
            found[-1]["searches"] += 1
            continue
        curvature = torch.linalg.eigvalsh(-hessian(density, search.position))
        mass = search.log_density + 0.5 * (math.log(2 * math.pi) - curvature.log()).sum()
        theta = ridges.original(search.position[None, : model.layout.size])
        scale_of_time = float(model.layout.constrain(theta)["kernel.lengthscale"])
        found.append({"log_density": search.log_density, "log_mass": float(mass), "lengthscale": scale_of_time, "searches": 1})
    return {"seconds": time.process_time() - began, "modes": found}


def hessian(density, position, step=1e-4):
    """From differences of gradients, ``(D, D)``."""
    ends = [density.value_and_grad(position + side * step * torch.eye(len(position)).to(position))[1] for side in (1, -1)]
    slopes = (ends[0] - ends[1]) / (2 * step)
    return 0.5 * (slopes + slopes.mT)


@dataclass(frozen=True)
class At:
    """A method whose chains begin at given positions [theta, v] ``(C, P + V)``."""

    method: Any
    positions: torch.Tensor

    def prepare(self, model, settings):
        run = self.method.prepare(model, settings)
        return run._replace(target=run.target._replace(start=lambda generator: (self.positions, None)))


def positions_of(model, draws):
    """[theta, v] of all draws ``(C S, P + V)``."""
    theta = model.layout.unconstrain({name: values.flatten(0, 1) for name, values in draws["samples"].items()})
    parts = zip(theta.split(200), draws["latents"].flatten(0, 1).split(200), strict=True)
    with torch.no_grad():
        return torch.cat([theta, torch.cat([model.whiten(model.prior(part), f) for part, f in parts])], -1)


def learned(start, positions):
    """The fit with the moments of draws in place of its own, the covariance of v given theta shrunk to its own."""
    theta, v = positions.tensor_split([start.model.layout.size], -1)
    centre, mean = theta.mean(0), v.mean(0)
    slope = torch.linalg.lstsq(theta - centre, v - mean).solution.mT
    left, own = v - mean - (theta - centre) @ slope.mT, torch.block_diag(*(start.scale @ start.scale.mT))
    share = len(v) / (len(v) + 5 * v.shape[1])
    covariance = share * torch.cov(left.mT) + (1 - share) * own
    blocks = covariance.view(*start.mean.shape, *start.mean.shape).diagonal(dim1=0, dim2=2).movedim(-1, 0)
    moments = {"theta_covariance": torch.cov(theta.mT), "mean": mean.view_as(start.mean), "scale": torch.linalg.cholesky(blocks)}
    joint = None if start.joint_scale is None else torch.linalg.cholesky(covariance)
    return replace(start, theta=centre, slope=slope, joint_scale=joint, **moments)


def learned_once(path, start, positions):
    """:func:`learned`, kept in a file: least squares differ in their last digits from run to run, and a checkpoint sees that."""
    names = "theta", "slope", "joint_scale", "theta_covariance", "mean", "scale"
    if not path.exists():
        found = learned(start, positions)
        torch.save({name: getattr(found, name) for name in names}, path)
    return replace(start, **torch.load(path))


def far_apart(positions, draws):
    """Those of draws with decay rates at both ends, gene after gene ``(CHAINS, P + V)``."""
    decay = draws["samples"]["likelihood.decay"].flatten(0, 1)
    levels = itertools.islice(itertools.product(range(decay.shape[-1]), (0.05, 0.95)), CHAINS)
    return positions[[int((decay[:, gene] - torch.quantile(decay[:, gene], level)).abs().argmin()) for gene, level in levels]]


def piece(experiment, name, data, pieces, scale):
    """Chain-sweeps a second and how the sampler fared; its draws go to a file beside."""
    made = SAMPLERS[name]
    warm_up, draws = (int(number * scale) for number in LENGTHS[experiment][name])
    path = pieces / f"{experiment}_{name.replace(' ', '_')}"
    before = json.loads(path.with_suffix(".json").read_text())["seconds"] if path.with_suffix(".json").exists() else 0.0
    began = time.process_time()
    start = tg.initialize(EXPERIMENTS[experiment](data), progress=False)
    fitting = time.process_time() - began
    run: dict[str, Any] = {"num_samples": draws, "warmup_steps": warm_up, "num_chains": CHAINS, "seed": 1, "progress": False}
    run["checkpoint"] = tg.Checkpoint(path.with_suffix(".run"), every=50)
    names = ["NUTS"] if name == "NUTS again" else ["NUTS_again", "NUTS"]
    references, method = [pieces / f"{experiment}_{earlier}.pt" for earlier in names], None
    reference = next((path for path in references if path.exists()), None)
    if name != "NUTS" and reference is not None:
        earlier = torch.load(reference)
        positions = positions_of(start.model, earlier)
        start = learned_once(path.with_suffix(".start"), start, positions)
        method = None if name == "NUTS again" else At(made(start, GENE_BY_GENE[experiment]), far_apart(positions, earlier))
    run |= {"start": start} if method is None else {}
    posterior = tg.sample(start.model, method or made(start, GENE_BY_GENE[experiment]), **run)
    samples = dict(posterior.samples)
    torch.save({"samples": samples, "latents": posterior.latents}, path.with_suffix(".pt"))
    return {
        "seconds": before + time.process_time() - began,
        "fitting": fitting,
        "warm_up": warm_up,
        "thinning": 1 if name.startswith("NUTS") else THINNING,
        "acceptance": float(posterior.stats["acceptance_rate"].mean()),
        "at_draws_of_NUTS": method is not None,
        "unfinished": posterior.info["interrupted"],
    }


def main():
    everything = ["simulated", "speed", "modes", *(f"{experiment} {name}" for experiment in EXPERIMENTS for name in SAMPLERS)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--pieces", type=Path, required=True)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--only", nargs="*", default=everything)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    torch.set_num_threads(1)
    options.pieces.mkdir(parents=True, exist_ok=True)
    found = {}
    for name in everything:
        path = options.pieces / f"{name.replace(' ', '_')}.json"
        if name in options.only and (not path.exists() or json.loads(path.read_text()).get("unfinished")):
            experiment, _, sampler = name.partition(" ")
            if sampler:
                made = piece(experiment, sampler, options.data, options.pieces, options.scale)
            else:
                made = {"simulated": simulated, "speed": speed, "modes": modes}[name](options.data, options.scale)
            path.write_text(json.dumps(made | {"scale": options.scale}))
        if path.exists():
            found[name] = json.loads(path.read_text())
            print(name, found[name], flush=True)
    if options.figure:
        draw_figure(options.pieces, options.figure, {name: make(options.data) for name, make in EXPERIMENTS.items()})
    if options.output:
        options.output.write_text(text_of(found, options.pieces, everything, SAMPLERS))


if __name__ == "__main__":
    main()
