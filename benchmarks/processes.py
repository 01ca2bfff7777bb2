"""Fresh processes for every measurement, and a virtual environment of its own for every peer."""

import json
import os
import pathlib
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
ENVIRONMENTS = HERE / ".environments"


def peer_python(name, requirements):
    """The interpreter of a peer's environment, made and filled on first use."""
    folder = ENVIRONMENTS / name
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        print(f"installing {', '.join(requirements)} into {folder}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *requirements], check=True)
        (folder / "installed").touch()
    return str(python)


def measure(python, script, *arguments):
    """Runs ``script`` in a fresh process and returns the JSON object on its last line."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent), "PYTHONWARNINGS": "ignore", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [python, str(HERE / script), *map(str, arguments)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    return json.loads(output.strip().splitlines()[-1])


def median(results, key):
    return statistics.median(result[key] for result in results)
