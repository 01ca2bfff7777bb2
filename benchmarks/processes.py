"""Fresh processes for every measurement, and a virtual environment of its own for every peer."""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

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


def _command(python, script, arguments):
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent), "PYTHONWARNINGS": "ignore", "TF_CPP_MIN_LOG_LEVEL": "3"}
    return {"args": [python, str(HERE / script), *map(str, arguments)], "text": True, "env": environment}


def measure(python, script, *arguments):
    """Runs ``script`` in a fresh process and returns the JSON object on its last line."""
    output = subprocess.run(check=True, capture_output=True, **_command(python, script, arguments)).stdout
    return json.loads(output.strip().splitlines()[-1])


def objects(python, script, *arguments):
    """Runs ``script`` in a fresh process and yields the JSON object on each line, as soon as it is there."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(**_command(python, script, arguments), **pipes) as process:
        yield from map(json.loads, process.stdout)


class Worker:
    """``script`` in a process that lives on, warmed up by a first call, for several to be measured in turns: see :func:`serve`."""

    def __init__(self, python, script, *arguments):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(**_command(python, script, arguments), **pipes)
        self.first = self.ask(0.0)  # what warmed it up

    def ask(self, seconds):
        """Seconds of each call within so many seconds, by the clock that its script serves by."""
        print(seconds, file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def stop(self):
        self._process.stdin.close()
        self._process.wait()


def serve(function, clock=time.process_time):
    """Answers a :class:`Worker`'s questions: calls ``function`` at least once for each, and times it by ``clock``."""
    for line in sys.stdin:
        deadline, times = time.perf_counter() + float(line), []
        while not times or time.perf_counter() < deadline:
            began = clock()
            function()
            times.append(clock() - began)
        print(json.dumps(times), flush=True)


def median(results, key):
    return statistics.median(result[key] for result in results)
