"""Trajectories that follow means over few points, and coordinates that turn with theta, beside what they stand for.

    python benchmarks/rough_trajectories.py --data ../shared/data [--case segment+all] [--draws 300]

A `SparseGP` of many classes, one thread, CPU time; one of each in turns, the least of five. First a gradient of [theta, v] by
integrals and by points, and how sums over the data differ from one draw around the fit to the next. Then, with `--draws`, four
chains around the same rough fit in coordinates that are fixed, and that turn.
"""

import argparse
import time
import warnings
from dataclasses import replace
from pathlib import Path

import torch
from default_call_cases import case

import torchgpmc as tg
from torchgpmc.models.affine import AffineMap
from torchgpmc.models.rough import with_rough_expectations, with_rough_gradients
from torchgpmc.variational import Start

STATISTICS = "step_size", "n_steps", "acceptance_rate"
METHOD = tg.HMC(num_steps=20, least_steps=4, rough_trajectories=True)


class Fixed(Start):
    """A fit whose coordinates are white at its theta alone."""

    def white_coordinates(self):
        mean, scale = (self.mean.view(1, -1), self.joint_scale[None]) if self.joint_scale is not None else (self.mean, self.scale)
        return AffineMap(self.theta, mean, self.slope, scale)


def draws_around(fit, count):
    """Positions [theta, v] ``(count, P + V)`` of the fit's own normal density."""
    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(count, len(fit.theta), generator=generator, dtype=torch.float64)
    theta = fit.theta + theta @ torch.linalg.cholesky(fit.theta_covariance).mT
    white = torch.randn(count, fit.mean.numel(), generator=generator, dtype=torch.float64)
    return torch.cat([theta, fit.white_coordinates().latents(theta, white)], -1)


def milliseconds(functions, repeats=5):
    """The least of each, a call of each in turn."""
    times = [[] for _ in functions]
    for _ in range(repeats):
        for function, known in zip(functions, times, strict=True):
            began = time.process_time()
            function()
            known.append(time.process_time() - began)
    return [1e3 * min(known) for known in times]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--case", default="segment+all")
    parser.add_argument("--draws", type=int, default=0, help="a chain, after 100 of warm-up")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    model, _, _ = case(arguments.data, arguments.case, 500)
    began = time.process_time()
    fit = tg.initialize(model, optimize_inducing_points=False, rough_expectations=True, progress=False)
    spent = time.process_time() - began
    print(f"{arguments.case}: {len(model.train_x)} data, {model.latent_size} latents; {spent:.0f} CPU s, {fit}")

    exact, points, followed = map(tg.joint_log_density, (model, with_rough_expectations(model), with_rough_gradients(model)))
    around = draws_around(fit, 40)
    of_four = [lambda one=one: one.value_and_grad(around[:4]) for one in (exact, points, followed)]
    times = milliseconds([*of_four, lambda: exact(around[:4])])
    values = [torch.cat([one(rows) for rows in around.split(4)]) for one in (exact, points, followed)]
    gaps = [float((value - values[0]).std()) for value in values[1:]]
    print("| | ms a chain | log density off from draw to draw |", "|---|---|---|", sep="\n")
    names = ("gradient by integrals", "by points", "by points, in single precision", "value by integrals")
    for name, spent, gap in zip(names, times, ("", f"{gaps[0]:.2f}", f"{gaps[1]:.2f}", ""), strict=True):
        print(f"| {name} | {spent / 4:.1f} | {gap} |")
    if not arguments.draws:
        return
    print("| coordinates | CPU s | step, steps, accepted | worth of theta, and `lp` | R-hat |", "|---|---|---|---|---|", sep="\n")
    for name, start in (("fixed", Fixed(**{**vars(fit), "others": ()})), ("turning", replace(fit, others=()))):
        began = time.process_time()
        posterior = tg.sample(
            fit.model, METHOD, start=start, num_chains=4, warmup_steps=100, num_samples=arguments.draws, seed=0, progress=False
        )
        spent, rows = time.process_time() - began, posterior.summary().rows
        step, length, accepted = (float(posterior.stats[part].double().mean()) for part in STATISTICS)
        worth = ", ".join(f"{min(row.ess_bulk, row.ess_tail):.0f}" for row in rows)
        rhat = max(row.rhat for row in rows)
        print(f"| {name} | {spent:.0f} | {step:.2f}, {length:.1f}, {accepted:.2f} | {worth} | {rhat:.3f} |", flush=True)


if __name__ == "__main__":
    main()
