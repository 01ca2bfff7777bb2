"""Results: draws by gpytorch's names, and f at test inputs given each draw."""

from torchgpmc.posterior.posterior import Posterior

__all__ = ["Posterior"]
