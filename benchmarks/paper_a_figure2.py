"""Paper A, figure 2: spread of the estimated posterior density of the lengthscale over repeats.

    python benchmarks/paper_a_figure2.py [--repeats 500]

Probit GP, d=2, tau=0.35 and sigma=2.08 (fixed at the truth), n=50 and 200; Laplace and EP; N_imp 1 and 64. Prints the standard
deviation of the log estimate at several tau, and writes docs/results/paper_a_figure2.png: median and 2.5 and 97.5 % quantiles over
repeats, and the prior. The paper shows the same curves without numbers.
"""

import argparse
import pathlib

import torch
from problems import probit_model

import torchgpmc as tg
from torchgpmc.density import keep_freed_memory

OUTPUT = pathlib.Path(__file__).parent.parent / "docs" / "results" / "paper_a_figure2.png"
SHOWN = (0.15, 0.25, 0.35, 0.6, 1.0)


def estimates(model, estimator, taus, repeats, generator):
    """log estimates of p(y | tau) (repeats, taus)."""
    values = {"kernel.outputscale": torch.full((len(taus),), 2.08), "kernel.base_kernel.lengthscale": taus.view(-1, 1, 1)}
    theta = model.layout.unconstrain({name: value.double() for name, value in values.items()})
    # The approximation is the same in every repeat, so that a start from it costs one step.
    with torch.no_grad():
        found = [estimator.approximation.importance_density(model, model.prior(row[None])).start for row in theta]
    start = torch.cat(found)
    return torch.stack([estimator.draw(theta, generator, start).value for _ in range(repeats)])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=500)
    options = parser.parse_args()
    from matplotlib.figure import Figure

    keep_freed_memory()
    taus = torch.cat([torch.tensor(SHOWN), torch.linspace(0.08, 1.2, 24)]).double()
    figure = Figure(figsize=(12, 6), layout="constrained")
    axes = figure.subplots(2, 4)
    print("| n | approximation | N_imp | " + " | ".join(f"tau={tau}" for tau in SHOWN) + " |")
    print("|---|---|---|" + "---|" * len(SHOWN))
    for row, num_data in enumerate((50, 200)):
        model = probit_model(num_data, 2, ard=False)
        for column, (approximation, count) in enumerate((a, c) for a in (tg.Laplace(), tg.EP()) for c in (1, 64)):
            estimator = tg.evidence.importance(model, approximation, num_importance=count)
            logs = estimates(model, estimator, taus, options.repeats, torch.Generator().manual_seed(0))
            name = type(approximation).__name__
            deviation = logs.std(0)[: len(SHOWN)]
            print(
                f"| {num_data} | {name} | {count} | " + " | ".join(f"{float(value):.3f}" for value in deviation) + " |", flush=True
            )
            order = taus.argsort()
            log_prior = -taus / 2**0.5
            level = (logs + log_prior).median(0).values.max()
            density = (logs + log_prior - level).exp()[:, order]
            axis = axes[row, column]
            axis.plot(taus[order], density.median(0).values)
            axis.fill_between(taus[order], *(density.quantile(q, 0) for q in (0.025, 0.975)), alpha=0.3)
            axis.plot(taus[order], (log_prior[order] - log_prior.max()).exp(), "r", linewidth=0.8)
            axis.set_title(f"{name} ({count}), n={num_data}", fontsize=9)
            axis.set_xlabel("tau")
    OUTPUT.parent.mkdir(exist_ok=True)
    figure.savefig(OUTPUT, dpi=90)


if __name__ == "__main__":
    main()
