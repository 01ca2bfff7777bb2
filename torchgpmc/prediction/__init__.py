"""Predictions, and what each posterior draw says at test points."""

from torchgpmc.prediction.prediction import Prediction

__all__ = ["Prediction"]
