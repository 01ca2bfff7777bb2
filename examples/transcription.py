"""The concentration of a transcription factor from the expression of the genes it regulates (paper C, section 1.7).

Without ``--data`` the genes are simulated, and the truth is drawn beside what is inferred. With it, a file of columns ``gene``,
``y``, a time (``time_h`` or ``time_min``) and maybe ``replicate`` and ``var``, the variance of ``y`` as measured:

    python examples/transcription.py --data p53.csv.gz --initial-log-concentration -5
    python examples/transcription.py --data ecoli_lexa.csv.gz --represses --free-initial

Run with defaults it takes a few minutes on one core.
"""

import argparse
import csv
import gzip
import pathlib
from typing import NamedTuple

import torch
from gpytorch.kernels import RBFKernel
from gpytorch.priors import LogNormalPrior
from matplotlib.figure import Figure

import torchgpmc as tg
from torchgpmc.likelihoods import Activation, Repression, Transcription


class Expression(NamedTuple):
    genes: list[str]
    times: torch.Tensor  # (T,)
    values: torch.Tensor  # (replicates, genes, times)
    variances: torch.Tensor | None
    concentration: torch.Tensor | None  # (replicates, grid), if known
    decay: torch.Tensor | None  # (genes,), if known


def read(path):
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
        rows = list(csv.DictReader(file))
    (time,) = [column for column in ("time_h", "time_min") if column in rows[0]]
    genes = list(dict.fromkeys(row["gene"] for row in rows))
    replicates = sorted({row.get("replicate", "1") for row in rows})
    times = sorted({float(row[time]) for row in rows})
    place = {
        (row.get("replicate", "1"), row["gene"], float(row[time])): (float(row["y"]), float(row.get("var", "nan"))) for row in rows
    }
    table = torch.tensor([[[place[r, g, t] for t in times] for g in genes] for r in replicates], dtype=torch.float64)
    known = table[..., 1] if "var" in rows[0] else None
    return Expression(genes, torch.tensor(times, dtype=torch.float64), table[..., 0], known, None, None)


def simulate(grid, num_genes, num_replicates, seed):
    """A pulse of the factor, of another height in every replicate, and genes that it activates."""
    generator = torch.Generator().manual_seed(seed)
    times = torch.arange(0, 13, 2, dtype=torch.float64)
    heights = 1 + 0.2 * torch.arange(num_replicates, dtype=torch.float64)
    f = -0.8 + 1.8 * heights[:, None] * (-((grid - 4.0) / 2.5).square()).exp() + 0.4 * (0.8 * grid).sin()
    likelihood = Transcription(
        grid,
        times,
        num_genes=num_genes,
        num_replicates=num_replicates,
        response=Activation(),
        variances=torch.full((num_replicates, num_genes, len(times)), 0.1**2),
    )
    likelihood.basal, likelihood.sensitivity, likelihood.michaelis_constant = (
        scale * (0.4 * torch.randn(num_genes, generator=generator)).exp() for scale in (0.1, 1.2, 0.8)
    )
    likelihood.decay = torch.linspace(0.3, 0.9, num_genes)
    latents = f.mT.unsqueeze(0) if num_replicates > 1 else f
    with torch.no_grad():
        values = likelihood.sample(latents, generator)[0]
    genes = [f"gene {j + 1}" for j in range(num_genes)]
    return Expression(genes, times, values, likelihood.variances, f.exp(), likelihood.decay.detach())


def make_model(data, grid, options):
    replicates, genes, _ = data.values.shape
    likelihood = Transcription(
        grid,
        data.times,
        num_genes=genes,
        num_replicates=replicates,
        response=Repression() if options.represses else Activation(),
        variances=data.variances,
        free_initial=options.free_initial,
    )
    span = float(grid[-1] - grid[0])
    kernel = RBFKernel(lengthscale_prior=LogNormalPrior(torch.tensor(span / 6).log(), 0.5))  # of variance one
    if options.initial_log_concentration is None:
        return tg.GP(grid, data.values, kernel, likelihood)
    known = {"known_inputs": grid[:1], "known_values": torch.tensor([options.initial_log_concentration])}
    return tg.ConditionedGP(grid, data.values, kernel, likelihood, **known)


def band(draws):
    """Mean and 95 % band over chains and draws."""
    flat = draws.flatten(0, 1)
    return flat.mean(0), *(torch.quantile(flat, q, 0) for q in (0.025, 0.975))


def draw_figure(posterior, data, grid, path):
    """As figure 1.6: concentration, the expression of a gene that fits well and of one that fits badly, and decay rates."""
    figure = Figure(figsize=(14, 3.4), layout="constrained")
    left, *middle, right = figure.subplots(1, 4)
    latents = posterior.latents if posterior.latents.dim() == 4 else posterior.latents.unsqueeze(-1)
    mean, low, high = band(latents.exp()[..., 0])
    left.fill_between(grid, low, high, alpha=0.3, linewidth=0)
    left.plot(grid, mean, label="inferred, 95 % band")
    if data.concentration is not None:
        left.plot(grid, data.concentration[0], "k--", linewidth=1, label="truth")
    left.set_title("concentration, first replicate")
    left.legend(fontsize=8)

    fine = posterior_expression(posterior, grid)
    fitted = posterior.fitted()
    misfit = (data.values - fitted.mean).square().sum((0, 2)) / data.values.var((0, 2))
    for axis, gene in zip(middle, (int(misfit.argmin()), int(misfit.argmax())), strict=True):
        mean, low, high = band(fine[:, :, 0, gene])
        axis.fill_between(grid, low, high, alpha=0.3, linewidth=0)
        axis.plot(grid, mean)
        error = None if data.variances is None else 2 * data.variances[0, gene].sqrt()
        axis.errorbar(data.times, data.values[0, gene], error, fmt="rx", capsize=2)
        axis.set_title(f"expression of {data.genes[gene]}")
    for axis in (left, *middle):
        axis.set_xlabel("time")
        axis.set_ylim(bottom=0)

    decay = posterior.samples["likelihood.decay"].flatten(0, 1)
    low, center, high = (torch.quantile(decay, q, 0) for q in (0.025, 0.5, 0.975))
    places = torch.arange(len(data.genes))
    right.bar(places, center, color="0.75")
    right.errorbar(places, center, torch.stack([center - low, high - center]), fmt="none", ecolor="k", capsize=3)
    if data.decay is not None:
        right.plot(places, data.decay, "k_", markersize=18, label="truth")
        right.legend(fontsize=8)
    right.set_xticks(places, data.genes, rotation=60, fontsize=7)
    right.set_title("decay rates, median")
    figure.savefig(path, dpi=110)


def posterior_expression(posterior, grid, num_draws=400):
    """Expression without noise on the whole grid ``(1, draws, replicates, genes, P)`` at some of the draws, to draw curves."""
    sampled = posterior.model.likelihood
    fine = Transcription(
        grid,
        grid,
        num_genes=sampled.num_genes,
        num_replicates=sampled.num_latents,
        response=sampled.response,
        free_initial=sampled.free_initial,
        integrate_variances=True,  # noise is of no account here
    )
    latents = posterior.latents.flatten(0, 1)
    samples = {
        name.removeprefix("likelihood."): values.flatten(0, 1)
        for name, values in posterior.samples.items()
        if name.startswith("likelihood.") and name != "likelihood.noise_precision"
    }
    curves = []
    for row in torch.linspace(0, len(latents) - 1, min(num_draws, len(latents))).long():
        for name, values in samples.items():
            setattr(fine, name, values[row])
        with torch.no_grad():
            curves.append(fine.expected_response(latents[row].unsqueeze(0)))
    return torch.stack(curves, 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=pathlib.Path, help="a file of measurements; simulated ones by default")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("demo-output"), help="folder for the figure")
    parser.add_argument("--represses", action="store_true", help="the factor represses its genes")
    parser.add_argument("--free-initial", action="store_true", help="genes do not start from their equilibrium without the factor")
    parser.add_argument("--initial-log-concentration", type=float, help="if it is known")
    parser.add_argument("--num-points", type=int, default=37, help="of the grid; 121 in the paper")
    parser.add_argument("--num-samples", type=int, default=200)
    parser.add_argument("--warmup-steps", type=int, default=200)
    parser.add_argument("--max-tree-depth", type=int, default=6, help="of NUTS: bounds the time of its first steps")
    parser.add_argument("--num-chains", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    if options.data is None:
        grid = torch.linspace(0, 12, options.num_points, dtype=torch.float64)
        data = simulate(grid, num_genes=5, num_replicates=2, seed=options.seed)
    else:
        data = read(options.data)
        grid = torch.linspace(float(data.times[0]), float(data.times[-1]), options.num_points, dtype=torch.float64)
    model = make_model(data, grid, options)
    replicates, genes, times = data.values.shape
    print(
        f"{genes} genes, {replicates} replicates, {times} times; {model.layout.size} hyperparameters, {model.latent_size} latents"
    )
    start = tg.initialize(model)
    posterior = tg.sample(
        start.model,
        tg.NUTS(max_tree_depth=options.max_tree_depth),
        start=start,
        num_samples=options.num_samples,
        warmup_steps=options.warmup_steps,
        num_chains=options.num_chains,
        seed=options.seed,
    )
    print(posterior.summary())

    print()
    fitted = posterior.fitted()
    inside = (data.values > fitted.quantile(0.025)) & (data.values < fitted.quantile(0.975))
    print(f"{float(inside.double().mean()):.0%} of the measurements lie in the 95 % bands of the expression without noise")
    if data.decay is not None:
        latents = posterior.latents if replicates > 1 else posterior.latents.unsqueeze(-1)
        concentration, decay = latents.exp().flatten(0, 1).mT, posterior.samples["likelihood.decay"].flatten(0, 1)
        for name, draws, truth in (("concentrations", concentration, data.concentration), ("decay rates", decay, data.decay)):
            low, high = torch.quantile(draws, 0.025, 0), torch.quantile(draws, 0.975, 0)
            share = ((low < truth) & (truth < high)).double().mean()
            print(f"{float(share):.0%} of the true {name} lie in their 95 % bands")
    options.output.mkdir(parents=True, exist_ok=True)
    draw_figure(posterior, data, grid, options.output / "transcription.png")
    print(f"figure: {options.output / 'transcription.png'}")


if __name__ == "__main__":
    main()
