"""What a long attack found, as a table: ``python -m tests.attack.record FOLDER FILE`` after ``make test-long``."""

import collections
import json
import platform
import sys
from pathlib import Path

import torch


def write_piece(folder, piece, result, found):
    """One piece's counts, worst scores and alarms as JSON."""
    engines = collections.defaultdict(lambda: {"runs": 0, "warned": 0, "comparisons": 0, "largest score": 0.0})
    for engine in {(c.model, c.engine, c.warned) for c in result.comparisons}:
        engines[engine[1]]["runs"] += 1
        engines[engine[1]]["warned"] += engine[2]
    for comparison in result.comparisons:
        if not comparison.warned:
            row = engines[comparison.engine]
            row["comparisons"] += 1
            row["largest score"] = max(row["largest score"], abs(comparison.score))
    content = {
        "first": piece.start,
        "models": len(piece),
        "unjudged": result.unjudged,
        "engines": engines,
        "found": [str(item) for item in found],
    }
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / f"{piece.start:06d}.json").write_text(json.dumps(content))


def main(folder, target):
    pieces = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    models = sum(piece["models"] for piece in pieces)
    unjudged = sum(len(piece["unjudged"]) for piece in pieces)
    engines = collections.defaultdict(collections.Counter)
    worst = collections.Counter()
    for piece in pieces:
        for name, row in piece["engines"].items():
            worst[name] = max(worst[name], row.pop("largest score"))
            engines[name].update(row)
    found = [item for piece in pieces for item in piece["found"]]
    lines = [
        "# Random models against brute force",
        "",
        f"{models} random models, the first of them number {min(piece['first'] for piece in pieces)}; brute force could not judge "
        f"{unjudged} of them. Scores are gaps over their joint Monte Carlo errors; runs that warned are counted, not judged.",
        "",
        f"Command: `make test-long` (torch {torch.__version__}, Python {platform.python_version()}).",
        "",
        "| engine | runs judged | of them warned | comparisons | largest score |",
        "|---|---|---|---|---|",
        *(f"| {n} | {r['runs']} | {r['warned']} | {r['comparisons']} | {worst[n]:.1f} |" for n, r in sorted(engines.items())),
        "",
        f"Found: {len(found) or 'nothing'}.",
        "",
        *(f"- {' '.join(item.split())[:300]}" for item in found),
    ]
    Path(target).write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
