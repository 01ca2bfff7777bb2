"""What transcription.py found, in words, tables and a figure."""

import itertools
import platform

import torch

from torchgpmc.adapter.functional import PureModule
from torchgpmc.diagnostics.chain_statistics import ess
from torchgpmc.diagnostics.summaries import effective_sizes
from torchgpmc.likelihoods import Transcription

DATA_SETS, CHAINS = 20, 8
PAPERS_SWEEPS, PAPERS_SECONDS = 5.5e5, 4 * 3600
MOST_RHAT = 1.02  # of chains whose Monte Carlo errors are to be believed
EVERY = 10  # points of the grid at which log concentrations are compared
FIGURE_OF = {"p53": "NUTS", "LexA": "NUTS"}  # whose draws


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
    lines = [
        f"{DATA_SETS} data sets, {found['warm_up']} warm-up sweeps and {found['draws']} draws of {CHAINS} chains each, which begin "
        f"at the truth: it is a draw from the posterior, so that no burn-in is owed; {found['seconds']:.0f} s. Passed over: "
        f"{found['without_fit']}, for which no mode was found; that depends on the data alone, given which ranks are uniform.",
        "",
        "| | within 95 % bands | least effective size of a data set | ranks of the truth among nine draws, 0 to 9 "
        "| t of mean rank, of distance from the middle |",
        "|---|---|---|---|---|",
    ]
    for name in ("decay rates", "log concentrations"):
        row = found[name]
        lines.append(
            f"| {name} | {row['covered']:.3f} | {row['size']:.0f} | {' '.join(map(str, row['ranks']))} "
            f"| {row['place']:.1f}, {row['spread']:.1f} |"
        )
    return "\n".join(lines)


def text_of_speed(found):
    rows = [
        f"| {name} | " + " | ".join(f"{rate:.0f}, {rate * PAPERS_SECONDS / PAPERS_SWEEPS:.1f}" for rate in rates) + " |"
        for name, rates in found["sweeps"].items()
    ]
    head = "| chain-sweeps a s, times the paper's 38; latents by | 8 chains in a batch | 32 chains |"
    return "\n".join([head, "|---|---|---|", *rows])


def text_of_modes(found):
    """Where searches ended, highest mass first."""
    rows = sorted(found["modes"], key=lambda mode: -mode["log_mass"])
    return "\n".join(
        [
            f"Modes of [theta, v], decay rates along the ridges; {found['seconds']:.0f} s.",
            "",
            "| log density | log mass by its curvature | lengthscale | searches that ended there |",
            "|---|---|---|---|",
            *(f"| {x['log_density']:.2f} | {x['log_mass']:.1f} | {x['lengthscale']:.2f} | {x['searches']} |" for x in rows),
        ]
    )


def quantities(draws):
    """Decay rates, log concentrations at some points, and the lengthscale, each ``(C, S, Q)``."""
    rates, both = draws["samples"]["likelihood.decay"], compared(draws)
    scale = draws["samples"]["kernel.lengthscale"].flatten(2)
    return {"decay rates": rates, "log concentrations": both[..., rates.shape[-1] :], "lengthscale": scale}


def text_of_experiment(found, pieces, experiment):
    lines = [
        "| sampler | warm-up + draws (thinned by) | share of the paper's 5.5e5 sweeps | s | acceptance "
        "| least effective size, a second, R-hat: decay rates | log concentrations | lengthscale |",
        "|---|---|---|---|---|---|---|---|",
    ]
    drawn, unmixed = {}, []
    for name, row in found.items():
        draws = drawn[name] = torch.load(pieces / f"{experiment}_{name.replace(' ', '_')}.pt")
        cells = []
        for values in quantities(draws).values():
            sizes = [effective_sizes(values[..., q]) for q in range(values.shape[-1])]
            size, rhat = min(found[0] for found in sizes), max(found[2] for found in sizes)
            cells.append(f"{size:.0f}, {size / row['seconds']:.2g}, {rhat:.3f}")
            unmixed += [name] if rhat > MOST_RHAT else []
        kept = draws["latents"].shape[1]
        share = "-" if name.startswith("NUTS") else f"{CHAINS * (row['warm_up'] + kept * row['thinning']) / PAPERS_SWEEPS:.1%}"
        lines.append(
            f"| {name} | {row['warm_up']} + {kept} ({row['thinning']}) | {share} | {row['seconds']:.0f} "
            f"| {row['acceptance']:.2f} | {' | '.join(cells)} |"
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
        lines += ["", f"R-hat above {MOST_RHAT} somewhere: {', '.join(dict.fromkeys(unmixed))}."]
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


def expression_on_the_grid(model, draws, count=200):
    """Without noise, at some of the draws ``(count, R, G, P)``."""
    known, grid = model.likelihood, model.train_x[:, 0]
    fine = Transcription(
        grid,
        grid,
        num_genes=known.num_genes,
        num_replicates=known.num_latents,
        response=known.response,
        free_initial=known.free_initial,
        integrate_variances=True,  # noise is of no account here
    )
    latents = draws["latents"].flatten(0, 1)
    rows = torch.linspace(0, len(latents) - 1, count).long()
    names = [name for name in draws["samples"] if name.startswith("likelihood.") and not name.endswith("noise_precision")]
    values = {f"raw_{name.removeprefix('likelihood.')}": draws["samples"][name].flatten(0, 1)[rows] for name in names}
    with torch.no_grad():
        return PureModule(fine)(values, lambda likelihood: likelihood.expected_response(latents[rows]))


def draw_band(axis, grid, drawn):
    """Median and 95 % band over draws ``(S, P)``."""
    low, middle, high = torch.quantile(drawn, torch.tensor([0.025, 0.5, 0.975]).double(), 0)
    axis.fill_between(grid, low, high, alpha=0.3, linewidth=0)
    axis.plot(grid, middle)


def draw_figure(pieces, path, models):
    """As figure 1.6: concentration, expression of the genes that fit best and worst, and decay rates."""
    from matplotlib.figure import Figure

    rows = {experiment: pieces / f"{experiment}_{name}.pt" for experiment, name in FIGURE_OF.items()}
    rows = {experiment: path_of_draws for experiment, path_of_draws in rows.items() if path_of_draws.exists()}
    figure = Figure(figsize=(14, 3 * len(rows)), layout="constrained")
    for (experiment, path_of_draws), axes in zip(rows.items(), figure.subplots(len(rows), 4, squeeze=False), strict=True):
        draws, model = torch.load(path_of_draws), models[experiment]
        grid, latents = model.train_x[:, 0], draws["latents"].flatten(0, 1)
        draw_band(axes[0], grid, (latents if latents.dim() == 2 else latents[..., 0]).exp())
        axes[0].set_title(f"{experiment}: concentration")
        expression, y = expression_on_the_grid(model, draws), model.train_y
        times = model.likelihood.elapsed + grid[0]
        measured = torch.searchsorted(grid, times - 1e-6)
        misfit = (expression.mean(0)[..., measured] - y).square().sum((0, 2)) / y.var((0, 2))
        for axis, gene in zip(axes[1:3], (int(misfit.argmin()), int(misfit.argmax())), strict=True):
            draw_band(axis, grid, expression[:, 0, gene])
            axis.plot(times, y[0, gene], "rx")
            axis.set_title(f"expression of gene {gene + 1}")
        for axis in axes[:3]:
            axis.set_ylim(bottom=0)  # after all that is drawn: it ends the search for limits
        levels = torch.tensor([0.025, 0.5, 0.975]).double()
        low, middle, high = torch.quantile(draws["samples"]["likelihood.decay"].flatten(0, 1), levels, 0)
        places = 1 + torch.arange(len(middle))
        axes[3].bar(places, middle, color="0.75")
        axes[3].errorbar(places, middle, torch.stack([middle - low, high - middle]), fmt="none", ecolor="k", capsize=3)
        axes[3].set_title("decay rates, gene by gene")
    figure.savefig(path, dpi=80)


def text_of(found, pieces, everything, samplers):
    by_experiment = {
        experiment: {name: found[f"{experiment} {name}"] for name in samplers if f"{experiment} {name}" in found}
        for experiment in FIGURE_OF
    }
    shown = {experiment: text_of_experiment(rows, pieces, experiment) for experiment, rows in by_experiment.items() if rows}
    missing = [name for name in everything if name not in found]
    return f"""# Gene transcription

Command: `python benchmarks/transcription.py --data FOLDER --pieces POSTERIORS` (torch {torch.__version__},
Python {platform.python_version()}, one thread, a machine with other work; seconds are processor time). Not run:
{", ".join(missing) or "nothing"}.

## Simulated from the prior

{text_of_simulated(found["simulated"]) if "simulated" in found else "Not run."}

## The paper's sweep on p53

{text_of_speed(found["speed"]) if "speed" in found else "Not run."}

## p53: 5 genes, 3 replicates, a grid of 121 points, {CHAINS} chains

{shown.get("p53", "Not run.")}

## LexA: 14 genes, a grid of 121 points, {CHAINS} chains

{shown.get("LexA", "Not run.")}

{text_of_modes(found["modes"]) if "modes" in found else "Modes: not run."}
"""
