"""Gene transcription (paper C, section 1.7; figure 1.6): calibration on simulated data, and p53 by four samplers.

    python benchmarks/transcription.py --data FOLDER --pieces POSTERIORS [--scale 1.0] [--output docs/results/transcription.md]

Each piece is a run of its own; what a piece gave is kept in POSTERIORS as JSON, and a second call makes those that are missing and
writes the table of all that are there. ``--scale`` multiplies draws and warm-up; ``--only`` takes pieces by name.

Simulated: twenty data sets from the prior, one a chain, NUTS on all unknowns; ranks of the truth among thinned draws, and the share
of it within 95 % bands. p53: five genes, three replicates, measured variances, log f(0) = -5, a grid of 121 points, 8 chains.
"""

import argparse
import csv
import gzip
import json
import math
import platform
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from gpytorch.kernels import RBFKernel
from gpytorch.priors import GammaPrior, LogNormalPrior

import torchgpmc as tg
from torchgpmc.diagnostics import effective_sizes
from torchgpmc.likelihoods import Activation, Transcription
from torchgpmc.models.gp_model import likelihood_values

P53 = {  # name: (method, warm-up, draws)
    "control variables": (tg.Gibbs(latent=tg.ControlVariables(), latent_steps=1, thinning=10), 1000, 3000),
    "elliptical slice": (tg.Gibbs(latent=tg.EllipticalSlice(), latent_steps=1, thinning=10), 1000, 3000),
    "aGrad": (tg.Gibbs(latent=tg.AuxiliaryGradient(), latent_steps=1, thinning=10), 1000, 3000),
    "NUTS": (tg.NUTS(max_tree_depth=8), 300, 300),
}
CHAINS, DATA_SETS = 8, 20
MOST_RHAT = 1.05  # of chains whose decay rates are shown and compared
PAPERS_SWEEPS = 5.5e5 / (4 * 3600)  # a second


def model_of(grid, times, y, variances, lengthscale_prior, known=None):
    replicates, genes, _ = y.shape
    likelihood = Transcription(grid, times, num_genes=genes, num_replicates=replicates, response=Activation(), variances=variances)
    kernel = RBFKernel(lengthscale_prior=lengthscale_prior)
    if known is None:
        return tg.GP(grid, y, kernel, likelihood)
    return tg.ConditionedGP(grid, y, kernel, likelihood, known_inputs=grid[:1], known_values=torch.tensor([known]))


def simulated_model():
    """Of a size at which twenty posteriors take minutes: four genes, one replicate, seven times."""
    grid = torch.linspace(0, 12, 25, dtype=torch.float64)
    times = grid[::4]
    y = torch.ones(1, 4, len(times), dtype=torch.float64)
    return model_of(grid, times, y, torch.full_like(y, 0.02), LogNormalPrior(math.log(2.5), 0.5), known=-1.0)


def p53_model(folder):
    with gzip.open(Path(folder) / "p53.csv.gz", "rt") as file:
        rows = list(csv.DictReader(file))
    column = lambda name: torch.tensor([float(row[name]) for row in rows], dtype=torch.float64).view(5, 3, 7).transpose(0, 1)  # noqa: E731
    grid = torch.linspace(0, 12, 121, dtype=torch.float64)
    times = torch.arange(0, 13, 2, dtype=torch.float64)
    return model_of(grid, times, column("y").contiguous(), column("var").contiguous(), GammaPrior(2.0, 1.0), known=-5.0)


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
    return result


def p53(name, folder, scale):
    """Mean, Monte Carlo error and effective size of each decay rate; chain-sweeps a second."""
    method, warm_up, draws = P53[name]
    warm_up, draws = int(warm_up * scale), int(draws * scale)
    began = time.process_time()
    posterior = tg.sample(
        p53_model(folder), method, num_samples=draws, warmup_steps=warm_up, num_chains=CHAINS, seed=1, progress=False
    )
    seconds = time.process_time() - began
    decay = posterior.samples["likelihood.decay"]
    sizes = [effective_sizes(decay[..., gene]) for gene in range(decay.shape[-1])]
    sweeps = warm_up + draws * method.thinning
    return {
        "seconds": seconds,
        "draws": draws,
        "warm_up": warm_up,
        "thinning": method.thinning,
        "mean": decay.mean((0, 1)).tolist(),
        "deviation": decay.flatten(0, 1).std(0).tolist(),
        "size": [float(size[0]) for size in sizes],
        "rhat": max(float(size[2]) for size in sizes),
        "sweeps": CHAINS * sweeps / seconds,
        "acceptance": float(posterior.stats["acceptance_rate"].mean()),
    }


def text_of_simulated(found):
    lines = [
        f"NUTS, {found['warm_up']} warm-up steps and {found['draws']} draws of each of {DATA_SETS} data sets; "
        f"{found['seconds']:.0f} s of processor time.",
        "",
        "| unknown | in 95 % bands | ranks of the truth among nine draws (0 to 9), counts |",
        "|---|---|---|",
    ]
    for name in ("decay rates", "log concentrations"):
        lines.append(f"| {name} | {found[name]['covered']:.1%} | {', '.join(map(str, found[name]['ranks']))} |")
    return "\n".join(lines)


def text_of_p53(found):
    lines = [
        "| sampler | warm-up + draws (thinned by) | s | chain-sweeps a s | over the paper's 38 | worst effective size | a second "
        "| R-hat | acceptance | decay rates (Monte Carlo error) |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in found.items():
        worst, mixed = min(row["size"]), row["rhat"] <= MOST_RHAT
        rates = zip(row["mean"], row["deviation"], row["size"], strict=True)
        shown = ", ".join(f"{mean:.3f} ({deviation / size**0.5:.3f})" for mean, deviation, size in rates)
        size, a_second = (f"{worst:.0f}", f"{worst / row['seconds']:.2g}") if mixed else ("-", "-")
        lines.append(
            f"| {name} | {row['warm_up']} + {row['draws']} ({row['thinning']}) | {row['seconds']:.0f} | {row['sweeps']:.0f} "
            f"| {row['sweeps'] / PAPERS_SWEEPS:.1f} | {size} "
            f"| {a_second} | {row['rhat']:.2f} | {row['acceptance']:.2f} "
            f"| {shown if mixed else 'too short a run to tell'} |"
        )
    return "\n".join([*lines, "", agreement(found)])


def agreement(found):
    """The largest difference of any two samplers' decay rates, in Monte Carlo errors, where these can be told."""
    rhat, worst = max(row["rhat"] for row in found.values()), 0.0
    if rhat > MOST_RHAT:
        return f"Too short to compare samplers: R-hat is up to {rhat:.2f}. Of this table the speeds alone mean something."
    for first in found.values():
        for second in found.values():
            gap = np.array(first["mean"]) - np.array(second["mean"])
            error = sum(np.array(row["deviation"]) ** 2 / np.array(row["size"]) for row in (first, second)) ** 0.5
            worst = max(worst, float(np.abs(gap / error).max()))
    return f"The largest difference between any two samplers, in any decay rate: {worst:.1f} Monte Carlo errors."


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--pieces", type=Path, required=True)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--only", nargs="*", default=["simulated", *P53])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    options.pieces.mkdir(parents=True, exist_ok=True)
    found = {}
    for name in ["simulated", *P53]:
        path = options.pieces / f"{name.replace(' ', '_')}.json"
        if not path.exists() and name in options.only:
            result = simulated(options.scale) if name == "simulated" else p53(name, options.data, options.scale)
            path.write_text(json.dumps(result | {"scale": options.scale}))
        if path.exists():
            found[name] = json.loads(path.read_text())
            print(
                name, {key: value for key, value in found[name].items() if key in ("seconds", "sweeps", "size", "rhat")}, flush=True
            )
    missing = [name for name in ["simulated", *P53] if name not in found]
    scales = ", ".join(f"{name} {row['scale']:g}" for name, row in found.items())
    text = f"""# Gene transcription

Command: `python benchmarks/transcription.py --data FOLDER --pieces POSTERIORS` (torch {torch.__version__}, Python
{platform.python_version()}, one thread, a machine with other work; seconds are processor time). Shares of the full runs: {scales}.
Not run: {", ".join(missing) or "nothing"}.

## Simulated from the prior

{text_of_simulated(found.pop("simulated")) if "simulated" in found else "Not run."}

## p53: 5 genes, 3 replicates, a grid of 121 points, {CHAINS} chains

{text_of_p53(found) if found else "Not run."}
"""
    if options.output:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
