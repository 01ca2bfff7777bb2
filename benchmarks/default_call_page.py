"""The page docs/results/default_call.md, from what benchmarks/default_call.py found."""

import math
import re
import statistics

from default_call_cases import has_probabilities

_FEW = 500  # data
_SERVED = 200  # effective draws asked for
_WITHIN, _WITHIN_TEST = 0.2, 0.02  # of the reference, in deviations, and in probability
_COLUMNS = ["case", "size", "hyperparameters", "engines", "CPU s", "ESS", "verdict", "test log density"]
_COLUMNS += ["theta off", "test off", "beside"]

_HEAD = """# The default call

`python benchmarks/default_call.py --data ../shared/data --runs FOLDER`: `tg.sample(model, seed=0)` without options, one seed a
case, {size} rows at most (`+all`: 7000, with 100 inducing points above 500). That script writes this page, in the words of
`benchmarks/default_call_page.py`, from what is in `default_call.json`.

- **CPU s** is of one thread (`OMP_NUM_THREADS=1`), predictions left out, on two cores that other jobs shared: of an AMD EPYC
  or of an Intel Xeon, on which the same call took a seventh longer (pima 13.1 for 11.5) and, when its neighbours were busy, up to
  half as long again. Those of segment+all and digits+all are of an Intel core with nothing beside it (beside one other job the same
  draws took 319 and 307), that of image+all beside two other jobs.
- A call that was stopped had said before it began how many minutes it would take (segment+ard and digits+ard 36).
- **ESS** is that of the worst hyperparameter, `lp` or latent, by which a call decides that it is done.
- **theta off, test off** hold the answer against a run of another engine (**beside**, with its own ESS; which one, says
  `benchmarks/default_call_beside.py`): the largest distance of a
  mean of theta, in posterior standard deviations, in brackets the standard error that both runs' ESS give to any one of them; and
  of a test probability (of regressions and counts, of a test mean in predictive standard deviations).

What led here is in [default_call_tried.md](default_call_tried.md), models of which no rule was made in
[other_data.md](other_data.md).

## What was asked, and what holds

"""

_TABLE = """
## Cases

A data set's name, then `+ard` (a lengthscale a column), `+noise` (a tenth of the labels flipped), `+twice` (a fifth of the rows
twice), `+all`. Engines in turn; in brackets whose estimates of p(y | theta) they take.

"""


def short(engine):
    """A method's name, and that of its evidence or approximation."""
    name = re.match(r"\w+", engine).group()
    inside = re.search(r"evidence=(?!None)(\w+)", engine) or re.search(r"^\w+\(approximation=(\w+)", engine)
    return f"{name}({inside.group(1)})" if inside else name


def _row(name, call, beside):
    if "failed" in call:
        return [name, *["-"] * 5, call["failed"], *["-"] * 4]
    row = [name, call["size"], call["hyperparameters"], " -> ".join(map(short, call["engines"])), f"{call['cpu']:.1f}"]
    row += [f"{call['ess']:.0f}", "trust" if not call["complaints"] else "do not trust", f"{call['score']:.3f}"]
    if beside is None or "failed" in beside:
        return [*row, "-", "-", "-" if beside is None else beside["failed"]]
    error = math.hypot(call["ess"] ** -0.5, beside["ess"] ** -0.5)
    lower = [complaint for complaint in beside["complaints"] if "nats below" in complaint]
    marked = "" if not beside["complaints"] else f", itself not trusted{''.join(f': {words}' for words in lower)}"
    return [
        *row,
        f"{_worst(beside):.2f} ({error:.2f})",
        f"{beside['test']:.3f}",
        f"{short(beside['engine'])}, {beside['ess']:.0f}{marked}",
    ]


def _worst(beside):
    return max(map(abs, beside["gaps"]))


def _line(cells):
    return f"| {' | '.join(map(str, cells))} |\n"


def _findings(found):
    """Lines of asked and found."""
    calls = {name: call for name, (call, _) in found.items() if "failed" not in call}
    good = [name for name, call in calls.items() if not call["complaints"] and call["ess"] >= _SERVED]
    stand = {name: beside for name, (_, beside) in found.items() if beside and not beside.get("complaints", True)}
    wrong = [name for name, beside in stand.items() if _is_off(name, beside)]
    far = "".join(f"; {name} {_worst(stand[name]):.2f} sd, {stand[name]['test']:.3f}" for name in wrong)
    few = {name: call for name, call in calls.items() if _rows(call) <= _FEW}
    many = {name: call for name, call in calls.items() if _rows(call) > _FEW}
    median = statistics.median(call["cpu"] for call in few.values())
    return (
        _line(["asked", "found"])
        + "|---|---|\n"
        + "".join(
            map(
                _line,
                [
                    ("95 % of cases trustworthy, with 200 effective draws and more", f"{len(good)} of {len(found)} cases"),
                    (
                        f"means within {_WITHIN} sd, test probabilities within {_WITHIN_TEST} (test means within {_WITHIN} sd)",
                        f"{len(stand) - len(wrong)} of the {len(stand)} that stand beside a run that is itself trusted{far}",
                    ),
                    ("a median under 20 s, n to 500", f"{median:.1f} CPU s of {len(few)} cases"),
                    ("no case over 120 s, n to 500", _longest(few) + _stopped(found, in_all=False)),
                    ("under five minutes, N to 7000", _longest(many) + _stopped(found, in_all=True)),
                ],
            )
        )
    )


def _is_off(name, beside):
    return _worst(beside) > _WITHIN or beside["test"] > (_WITHIN_TEST if has_probabilities(name) else _WITHIN)


def _rows(call):
    return int(call["size"].split(" x ")[0])


def _longest(calls):
    """The five longest calls, in words."""
    longest = sorted(calls, key=lambda name: calls[name]["cpu"], reverse=True)[:5]
    words = ", ".join(f"{name} {calls[name]['cpu']:.0f}" for name in longest)
    return f"the longest: {words}" if longest else "none was run"


def _stopped(found, in_all):
    """The calls that were stopped, on all rows or on some, in words."""
    failed = {name: call["failed"] for name, (call, _) in found.items() if "failed" in call}
    return "".join(f"; {name} {why}" for name, why in failed.items() if name.endswith("+all") == in_all)


def written(found, size):
    """The page, of what was found of each case."""
    parts = {name: (known["call"], known.get("beside")) for name, known in found.items()}
    rows = "".join(_line(_row(name, *known)) for name, known in parts.items())
    return _HEAD.format(size=size) + _findings(parts) + _TABLE + _line(_COLUMNS) + "|---" * len(_COLUMNS) + "|\n" + rows
