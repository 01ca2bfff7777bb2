"""Paper B, tables 1 to 3: errors of log orthant probabilities, log evidence and class probabilities.

    python benchmarks/paper_b_tables.py --table 1 --points 10000 --problems 20
    python benchmarks/paper_b_tables.py --table 2 --points 10000 --runs 5

The paper has 50 problems a row of table 1 and 20 runs a row of tables 2 and 3. Errors in percent are eq. 64's, of log I.
"""

import argparse
import time

import numpy as np
import torch
from orthant_problems import LINEAR, linear_model, linear_problem, one_factor

import torchgpmc as tg
from torchgpmc.orthant import Count, MinimaxTilting, SeparationOfVariables, Sequential

PAPER_1 = {
    (10_000, 50): 0.245, (10_000, 200): 0.101, (10_000, 500): 0.107,
    (30_000, 50): 0.141, (30_000, 200): 0.078, (30_000, 500): 0.080,
    (100_000, 50): 0.072, (100_000, 200): 0.039, (100_000, 500): 0.059,
}  # fmt: skip
PAPER_2 = {(10_000, 1): 0.00308, (10_000, 2): 0.00463, (10_000, 3): 0.00391, (10_000, 4): 0.00443,
           (30_000, 1): 0.00160, (30_000, 2): 0.00297, (30_000, 3): 0.00212, (30_000, 4): 0.00235}  # fmt: skip
PAPER_3 = {(10_000, 1): 0.1522, (10_000, 2): 0.1334, (10_000, 3): 0.0900, (10_000, 4): 0.0622,
           (30_000, 1): 0.1170, (30_000, 2): 0.0629, (30_000, 3): 0.0450, (30_000, 4): 0.0249}  # fmt: skip
METHODS = {
    "hard count": Sequential(Count.HARD, num_groups=1),
    "hard count, eight groups": Sequential(Count.HARD),
    "soft count": Sequential(Count.SOFT, num_groups=1),
    "adapted": Sequential(Count.ADAPTED, num_groups=1),
    "tilted separation of variables": SeparationOfVariables(),
    "tilted, in the order given": SeparationOfVariables(reordering=False),
    "untilted, hardest first": SeparationOfVariables(tilting=False),
    "untilted, in the order given": SeparationOfVariables(tilting=False, reordering=False),
    "minimax tilting, independent points": MinimaxTilting(),
}


def with_error(values):
    values = np.array(values)
    error = f" ({values.std(ddof=1) / len(values) ** 0.5:.1g})" if len(values) > 1 else ""
    return f"{values.mean():.3g}{error}"


def table_1(points, problems, sizes, methods):
    print("| N | M | method | MAPE, % (standard error) | paper, hard count | ms | problems |")
    print("|---|---|---|---|---|---|---|")
    for size in sizes:
        cases = [one_factor(size, seed) for seed in range(problems)]
        for name in methods:
            method = METHODS[name]
            errors, times = [], []
            for seed, (covariance, _, truth) in enumerate(cases):
                generator = torch.Generator().manual_seed(seed)
                began = time.perf_counter()
                found = tg.orthant.log_probability(
                    torch.as_tensor(covariance), lower=0.0, method=method, num_points=points, generator=generator
                )
                times.append(1e3 * (time.perf_counter() - began))
                errors.append(100 * abs(float(found.value) - truth) / abs(truth))
            paper = PAPER_1.get((points, size), "")
            print(
                f"| {size} | {points} | {name} | {with_error(errors)} | {paper} | {np.median(times):.0f} | {problems} of 50 |",
                flush=True,
            )


def table_2(points, runs, numbers):
    print("| problem | N | M | method | MAE of probabilities (s.e.) | paper | MAPE of log evidence, % (s.e.) | paper | s | runs |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    nothing = torch.zeros(1, 0, dtype=torch.float64)
    for number in numbers:
        x, y, tests, truth, probabilities = linear_problem(number)
        model = linear_model(x, y)
        for name in ("hard count", "soft count", "tilted separation of variables"):
            method = METHODS[name] if name != "tilted separation of variables" else None
            errors, logs, times = [], [], []
            for seed in range(runs):
                generator = torch.Generator().manual_seed(seed)
                began = time.perf_counter()
                found = tg.evidence.classify(model, nothing, num_points=points, method=method, generator=generator)
                ours = found.probabilities(torch.as_tensor(tests))[0].numpy()
                times.append(time.perf_counter() - began)
                errors.append(np.abs(ours - probabilities).mean())
                logs.append(100 * abs(float(found.log_evidence) - truth) / abs(truth))
            print(
                f"| {number} | {len(x)} | {points} | {name} | {with_error(errors)} | {PAPER_2.get((points, number), '')} | "
                f"{with_error(logs)} | {PAPER_3.get((points, number), '')} | {np.median(times):.1f} | {runs} of 20 |",
                flush=True,
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=int, choices=(1, 2), required=True)
    parser.add_argument("--points", type=int, default=10_000)
    parser.add_argument("--problems", type=int, default=50)
    parser.add_argument("--sizes", type=int, nargs="+", default=[50, 200, 500])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS), help="of table 1")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--numbers", type=int, nargs="+", default=list(LINEAR))
    options = parser.parse_args()
    if options.table == 1:
        table_1(options.points, options.problems, options.sizes, options.methods)
    else:
        table_2(options.points, options.runs, options.numbers)


if __name__ == "__main__":
    main()
