"""Gene transcription (paper C, section 1.7; figure 1.6): calibration on simulated data; p53 and LexA by several samplers.

    python benchmarks/transcription.py --data FOLDER --pieces POSTERIORS [--scale 1.0] [--output docs/results/transcription.md]

Each piece is a run of its own; what a piece gave is kept in POSTERIORS (JSON, and its draws), and a second call makes those that
are missing and writes the table of all that are there. ``--scale`` multiplies draws and warm-up; ``--only`` takes pieces by name;
``--figure FILE`` draws figure 1.6.

Simulated: twenty data sets from the prior, one a chain, NUTS on all unknowns; ranks of the truth among thinned draws, and the share
of it within 95 % bands. p53: five genes, three replicates, measured variances, log f(0) = -5, a grid of 121 points, 8 chains. LexA:
14 genes that it represses, one replicate, a sampled variance a gene, free starts. NUTS begins at the mode of all unknowns
(``tg.initialize``); the others begin at draws of NUTS's, two chains each at those with the lowest and the highest twentieth of a
gene's decay rate, where there is such a run: they mix too slowly to find their way in in the time given here.
"""

import argparse
import csv
import gzip
import itertools
import json
import math
import platform
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpytorch.kernels import RBFKernel
from gpytorch.priors import GammaPrior, LogNormalPrior

import torchgpmc as tg
from torchgpmc.chain_statistics import ess
from torchgpmc.diagnostics import effective_sizes
from torchgpmc.likelihoods import Activation, Repression, Transcription
from torchgpmc.models.gp_model import likelihood_values


def sweeps(latent):
    return tg.Gibbs(latent=latent, parameterization=tg.Ancillary(), latent_steps=1, thinning=10)


# Name: (method, warm-up, draws). Sweeps of 8 chains are as many as the paper's 5.5e5.
CONTROLS = tg.ControlVariables(target_accept_prob=0.15)
SAMPLERS = {
    "NUTS": (tg.NUTS(max_tree_depth=8), 1200, 2000),
    "control variables": (sweeps(CONTROLS), 5000, 6400),
    "elliptical slice": (sweeps(tg.EllipticalSlice()), 5000, 6400),
    "aGrad": (sweeps(tg.AuxiliaryGradient()), 5000, 6400),
}
CHAINS, DATA_SETS = 8, 20
LEAST_SIZE = 50  # effective draws of each data set, below which ranks and coverage say nothing of calibration
PAPERS_SWEEPS = 5.5e5 / (4 * 3600)  # a second
MOST_RHAT = 1.05  # of chains whose Monte Carlo errors are to be believed
EVERY = 10  # points of the grid at which log concentrations are compared


def p53_model(folder):
    with gzip.open(Path(folder) / "p53.csv.gz", "rt") as file:
        rows = list(csv.DictReader(file))
    column = lambda name: torch.tensor([float(row[name]) for row in rows], dtype=torch.float64).view(5, 3, 7).transpose(0, 1)  # noqa: E731
    grid = torch.linspace(0, 12, 121, dtype=torch.float64)
    times = torch.arange(0, 13, 2, dtype=torch.float64)
    return model_of(grid, times, column("y").contiguous(), column("var").contiguous(), GammaPrior(2.0, 1.0), known=-5.0)


def lexa_model(folder):
    with gzip.open(Path(folder) / "ecoli_lexa.csv.gz", "rt") as file:
        y = torch.tensor([float(row["y"]) for row in csv.DictReader(file)], dtype=torch.float64).view(1, 14, 6)
    grid = torch.linspace(0, 60, 121, dtype=torch.float64)
    times = torch.tensor([0, 5, 10, 20, 40, 60], dtype=torch.float64)
    likelihood = Transcription(grid, times, num_genes=14, num_replicates=1, response=Repression(), free_initial=True)
    return tg.GP(grid, y, RBFKernel(lengthscale_prior=GammaPrior(2.0, 0.2)), likelihood)


EXPERIMENTS = {"p53": p53_model, "LexA": lexa_model}
LAST_TIME = {"p53": 12, "LexA": 60}  # hours, minutes


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


def simulated(scale):
    """Ranks of the true decay rates and log concentrations, out of ten, and the share within 95 % bands."""
    made, generator = simulated_model(), torch.Generator().manual_seed(3)
    theta = made.layout.sample_prior(DATA_SETS, generator)
    v = torch.randn(DATA_SETS, made.latent_size, generator=generator, dtype=torch.float64)
    prior = made.prior(theta)
    f = made.latents(prior, v)
    y = made.likelihood_function(likelihood_values(prior), lambda likelihood: likelihood.sample(f, generator))
    draws, warm_up = int(900 * scale), int(400 * scale)
    began = time.process_time()
    posterior = tg.sample(
        made.with_targets(y),
        tg.NUTS(max_tree_depth=8),
        num_samples=draws,
        warmup_steps=warm_up,
        num_chains=DATA_SETS,
        seed=4,
        progress=False,
    )
    pairs = {
        "decay rates": (posterior.samples["likelihood.decay"], made.layout.constrain(theta)["likelihood.decay"]),
        "log concentrations": (posterior.latents[..., 4::4], f[:, 4::4]),
    }
    result = {"seconds": time.process_time() - began, "draws": draws, "warm_up": warm_up}
    kept = torch.linspace(draws // 18, draws - 1, 9).long()  # apart, so that their ranks are those of near independent draws
    for name, (drawn, truth) in pairs.items():
        low, high = torch.quantile(drawn, 0.025, 1), torch.quantile(drawn, 0.975, 1)
        result[name] = {
            "covered": float(((low < truth) & (truth < high)).double().mean()),
            "ranks": torch.bincount((drawn[:, kept] < truth[:, None]).sum(1).flatten(), minlength=10).tolist(),
        }
        one_each = drawn[..., 0]
        result[name]["size"] = min(ess(chain[None].numpy(), "bulk") for chain in one_each)
    return result


@dataclass(frozen=True)
class At:
    """A method whose chains begin at given positions [theta, v] ``(C, P + V)``."""

    method: Any
    positions: torch.Tensor

    def prepare(self, model, settings):
        run = self.method.prepare(model, settings)
        return run._replace(target=run.target._replace(start=lambda generator: (self.positions, None)))


def far_apart(model, draws):
    """Draws of NUTS's with decay rates at both ends, gene after gene: positions ``(CHAINS, P + V)``."""
    decay = draws["samples"]["likelihood.decay"].flatten(0, 1)
    levels = itertools.islice(itertools.product(range(decay.shape[-1]), (0.05, 0.95)), CHAINS)
    rows = torch.tensor([int((decay[:, gene] - torch.quantile(decay[:, gene], level)).abs().argmin()) for gene, level in levels])
    theta = model.layout.unconstrain({name: values.flatten(0, 1)[rows] for name, values in draws["samples"].items()})
    with torch.no_grad():
        v = model.whiten(model.prior(theta), draws["latents"].flatten(0, 1)[rows])
    return torch.cat([theta, v], -1)


def piece(experiment, name, data, pieces, scale):
    """Chain-sweeps a second and how the sampler fared; its draws go to a file beside."""
    method, warm_up, draws = SAMPLERS[name]
    warm_up, draws = int(warm_up * scale), int(draws * scale)
    model, start = EXPERIMENTS[experiment](data), None
    began = time.process_time()
    reference = pieces / f"{experiment}_NUTS.pt"
    if name == "NUTS":
        start = tg.initialize(model, progress=False)
        model = start.model
    elif reference.exists():
        method = At(method, far_apart(model, torch.load(reference)))
    fitting = time.process_time() - began
    posterior = tg.sample(
        model, method, num_samples=draws, warmup_steps=warm_up, num_chains=CHAINS, seed=1, progress=False, start=start
    )
    seconds = time.process_time() - began
    samples = dict(posterior.samples)
    torch.save({"samples": samples, "latents": posterior.latents}, pieces / f"{experiment}_{name.replace(' ', '_')}.pt")
    thinning = SAMPLERS[name][0].thinning
    return {
        "seconds": seconds,
        "fitting": fitting,
        "draws": draws,
        "warm_up": warm_up,
        "thinning": thinning,
        "gradients": float(posterior.stats["n_steps"].double().mean()),
        "sweeps": CHAINS * (warm_up + draws * thinning) / (seconds - fitting),
        "acceptance": float(posterior.stats["acceptance_rate"].mean()),
        "at_draws_of_NUTS": isinstance(method, At),
    }


def compared(draws):
    """Decay rates and log concentrations at some points of the grid, ``(C, S, Q)``."""
    latents = draws["latents"]
    latents = latents.unsqueeze(-1) if latents.dim() == 3 else latents
    return torch.cat([draws["samples"]["likelihood.decay"], latents[:, :, EVERY::EVERY].flatten(2)], -1)


def gaps(first, second):
    """Differences of two samplers' draws ``(C, S)`` of a number, in Monte Carlo errors: of means, and of shares below band edges.

    The edges of the 95 % band are those of both samplers' draws together.
    """
    edges = torch.quantile(torch.cat([first.flatten(), second.flatten()]), torch.tensor([0.025, 0.975]).double())
    found = []
    for of_draw in (lambda x: x, *(lambda x, edge=edge: (x < edge).double() for edge in edges)):
        sides = [of_draw(side) for side in (first, second)]
        errors = [side.var() / ess(side.numpy(), "mean") for side in sides]
        found.append(float((sides[0].mean() - sides[1].mean()).abs() / sum(errors) ** 0.5))
    return found


def text_of_simulated(found):
    run = (
        f"NUTS, {found['warm_up']} warm-up steps and {found['draws']} draws of each of {DATA_SETS} data sets; "
        f"{found['seconds']:.0f} s of processor time."
    )
    worst = min(found[name]["size"] for name in ("decay rates", "log concentrations"))
    if worst < LEAST_SIZE:
        return f"{run} Too short to tell: the worst effective size is {worst:.0f}."
    lines = [
        run,
        "",
        "| | within 95 % bands | worst effective size | ranks of the truth among nine draws, 0 to 9 |",
        "|---|---|---|---|",
    ]
    for name in ("decay rates", "log concentrations"):
        row = found[name]
        lines.append(f"| {name} | {row['covered']:.3f} | {row['size']:.0f} | {' '.join(map(str, row['ranks']))} |")
    return "\n".join(lines)


def text_of_experiment(found, pieces, experiment):
    lines = [
        "| sampler | warm-up + draws (thinned by) | s | chain-sweeps a s | over the paper's 38 | worst effective size "
        "| a second | R-hat of decay rates; lengthscale | acceptance |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    drawn, unmixed = {}, []
    for name, row in found.items():
        draws = drawn[name] = torch.load(pieces / f"{experiment}_{name.replace(' ', '_')}.pt")
        decay = draws["samples"]["likelihood.decay"]
        sizes = [effective_sizes(decay[..., gene]) for gene in range(decay.shape[-1])]
        worst, rhat = min(size[0] for size in sizes), max(size[2] for size in sizes)
        unmixed += [name] if rhat > MOST_RHAT else []
        of_scale = effective_sizes(draws["samples"]["kernel.lengthscale"].flatten(2)[..., 0])[2]
        of_sweeps = ("-", "-") if name == "NUTS" else (f"{row['sweeps']:.0f}", f"{row['sweeps'] / PAPERS_SWEEPS:.1f}")
        lines.append(
            f"| {name} | {row['warm_up']} + {row['draws']} ({row['thinning']}) | {row['seconds']:.0f} | {of_sweeps[0]} "
            f"| {of_sweeps[1]} | {worst:.0f} | {worst / row['seconds']:.2g} | {rhat:.3f}; {of_scale:.3f} "
            f"| {row['acceptance']:.2f} |"
        )
    lines += ["", "Means of decay rates (Monte Carlo error):", ""]
    for name, draws in drawn.items():
        decay = draws["samples"]["likelihood.decay"]
        each = [decay[..., gene] for gene in range(decay.shape[-1])]
        shown = ", ".join(f"{float(x.mean()):.3f} ({float(x.std()) / ess(x.numpy(), 'mean') ** 0.5:.3f})" for x in each)
        lines.append(f"- {name}: {shown}")
    at_draws = [name for name, row in found.items() if row["at_draws_of_NUTS"]]
    if at_draws:
        lines += ["", f"Begun at draws of NUTS's that lie far apart: {', '.join(at_draws)}."]
    if unmixed:
        lines += [
            "",
            f"R-hat above {MOST_RHAT}, so that their Monte Carlo errors are too small to compare by: {', '.join(unmixed)}.",
        ]
    return "\n".join([*lines, "", agreement({name: compared(draws) for name, draws in drawn.items()})])


def agreement(drawn):
    """The largest differences of any two samplers."""
    lines = [
        "Largest differences between two samplers, in Monte Carlo errors, of any decay rate or log concentration on the grid: of "
        "means, and of the shares below the edges of their 95 % bands.",
        "",
        "| samplers | means | lower edges | upper edges |",
        "|---|---|---|---|",
    ]
    for first, second in itertools.combinations(drawn, 2):
        found = torch.tensor([gaps(drawn[first][..., q], drawn[second][..., q]) for q in range(drawn[first].shape[-1])])
        lines.append(f"| {first}, {second} | " + " | ".join(f"{float(worst):.1f}" for worst in found.amax(0)) + " |")
    return "\n".join(lines)


def draw_figure(pieces, path):
    """Concentrations and decay rates, as figure 1.6 has them, from NUTS's draws."""
    from matplotlib.figure import Figure

    rows = {experiment: pieces / f"{experiment}_NUTS.pt" for experiment in EXPERIMENTS}
    rows = {experiment: path_of_draws for experiment, path_of_draws in rows.items() if path_of_draws.exists()}
    figure = Figure(figsize=(10, 3 * len(rows)), layout="constrained")
    for (experiment, path_of_draws), axes in zip(rows.items(), figure.subplots(len(rows), 2, squeeze=False), strict=True):
        draws = torch.load(path_of_draws)
        latents = draws["latents"].flatten(0, 1)
        concentration = (latents if latents.dim() == 2 else latents[..., 0]).exp()
        levels = torch.tensor([0.025, 0.5, 0.975]).double()
        low, middle, high = torch.quantile(concentration, levels, 0)
        grid = torch.linspace(0, LAST_TIME[experiment], len(middle))
        axes[0].fill_between(grid, low, high, alpha=0.3, linewidth=0)
        axes[0].plot(grid, middle)
        axes[0].set_title(f"{experiment}: concentration, median and 95 % band")
        low, middle, high = torch.quantile(draws["samples"]["likelihood.decay"].flatten(0, 1), levels, 0)
        places = torch.arange(len(middle))
        axes[1].bar(places, middle, color="0.75")
        axes[1].errorbar(places, middle, torch.stack([middle - low, high - middle]), fmt="none", ecolor="k", capsize=3)
        axes[1].set_title("decay rates, gene by gene")
    figure.savefig(path, dpi=100)


def main():
    everything = ["simulated", *(f"{experiment} {name}" for experiment in EXPERIMENTS for name in SAMPLERS)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--pieces", type=Path, required=True)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--only", nargs="*", default=everything)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    options.pieces.mkdir(parents=True, exist_ok=True)
    found = {}
    for name in everything:
        path = options.pieces / f"{name.replace(' ', '_')}.json"
        if not path.exists() and name in options.only:
            experiment, _, sampler = name.partition(" ")
            made = piece(experiment, sampler, options.data, options.pieces, options.scale) if sampler else simulated(options.scale)
            path.write_text(json.dumps(made | {"scale": options.scale}))
        if path.exists():
            found[name] = json.loads(path.read_text())
            print(name, found[name], flush=True)
    if options.figure:
        draw_figure(options.pieces, options.figure)
    if options.output:
        options.output.write_text(text_of(found, options.pieces, everything))


def text_of(found, pieces, everything):
    by_experiment = {
        experiment: {name: found[f"{experiment} {name}"] for name in SAMPLERS if f"{experiment} {name}" in found}
        for experiment in EXPERIMENTS
    }
    shown = {experiment: text_of_experiment(rows, pieces, experiment) for experiment, rows in by_experiment.items() if rows}
    missing = [name for name in everything if name not in found]
    return f"""# Gene transcription

Command: `python benchmarks/transcription.py --data FOLDER --pieces POSTERIORS` (torch {torch.__version__}, Python
{platform.python_version()}, one thread, a machine with other work; seconds are processor time). Shares of the full runs:
{", ".join(f"{name} {row['scale']:g}" for name, row in found.items())}. Not run: {", ".join(missing) or "nothing"}.

## Simulated from the prior

{text_of_simulated(found["simulated"]) if "simulated" in found else "Not run."}

## p53: 5 genes, 3 replicates, a grid of 121 points, {CHAINS} chains

{shown.get("p53", "Not run.")}

## LexA: 14 genes, a grid of 121 points, {CHAINS} chains

{shown.get("LexA", "Not run.")}
"""


if __name__ == "__main__":
    main()
