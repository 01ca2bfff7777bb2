"""gpytorch's kernels, means and likelihoods as pure functions of C settings of their parameters; users' own modules too."""
