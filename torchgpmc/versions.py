"""What is installed, for reports of errors."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys

import torch

_PACKAGES = (
    "torchgpmc",
    "torch",
    "gpytorch",
    "linear-operator",
    "pyro-ppl",
    "numpy",
    "scipy",
    "scikit-learn",
    "arviz",  # in place of the next on Python 3.10
    "arviz-stats",
    "arviz-base",
    "botorch",
    "matplotlib",
)


def show_versions() -> None:
    """Prints versions of Python, torchgpmc and what it builds on, and the machine: paste it into a report of an error.

    Example:
        >>> show_versions()
        python          ...
        platform        ...
        torchgpmc       ...
    """
    cuda = torch.version.cuda if torch.cuda.is_available() else "none"
    lines = {"python": sys.version.split()[0], "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            lines[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            lines[package] = "not installed"
    lines |= {"cuda": str(cuda), "threads": f"{torch.get_num_threads()} of {os.cpu_count()} cores"}
    print("\n".join(f"{name:<16}{value}" for name, value in lines.items()))
