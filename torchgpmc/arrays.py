"""Numbers from what users have: tensors, arrays, frames, lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def as_tensor(name: str, values: Any, device: torch.device | None = None) -> Tensor:
    """A tensor of numbers from what users have: a tensor as it is; a numpy array, a pandas frame or series, a list.

    Args:
        name: of the argument, for messages.
        values: numbers or truth values; what a masked array or a frame lacks becomes NaN.
        device: where it is to live; a tensor stays where it is.

    Raises:
        TypeError: text, objects or nothing of the kind; the message names a frame's columns that are not numeric.

    Example:
        >>> as_tensor("train_x", [[1, 2.5], [True, 0]])
        tensor([[1.0000, 2.5000],
                [1.0000, 0.0000]], dtype=torch.float64)
    """
    if isinstance(values, Tensor):
        return values.to_dense()
    dated = [name for name, dtype in _columns(values) if dtype.kind in "mM"]
    if dated:
        raise TypeError(
            f"{name} is a frame whose columns {dated} hold dates or durations. Expected numbers, of days since the first, say: "
            f"(dates - dates.min()) / pandas.Timedelta('1D'), durations / pandas.Timedelta('1D')."
        )
    if isinstance(values, list | tuple) and any(isinstance(value, Tensor) for value in values):
        return torch.stack([as_tensor(name, value, device) for value in values])
    try:
        array = np.asarray(values)
        if np.ma.is_masked(values):
            array = values.astype(float).filled(np.nan)
        if array.dtype == object and array.ndim:
            # Numbers of several kinds, or a frame of columns of several, or with pandas' own sign for none.
            array = values.to_numpy(float, na_value=np.nan) if hasattr(values, "select_dtypes") else array.astype(float)
    except (TypeError, ValueError):
        array = np.empty(0, dtype=object)
    if array.dtype.kind not in "biuf":
        raise TypeError(
            f"{name} is {_described(values)}. Expected numbers: a torch tensor, a numpy array, a numeric pandas frame or a list. "
            f"Encode text and categories first, for instance with sklearn.preprocessing.OrdinalEncoder or OneHotEncoder; give "
            f"dates as numbers, of days since the first, say."
            f"{' torchgpmc.GPClassifier takes labels of any kind.' if name == 'train_y' else ''}"
        )
    if not array.dtype.isnative or array.dtype == np.float16 or array.dtype == np.longdouble:
        array = array.astype(float)
    array = np.array(array, np.int64 if array.dtype.kind == "u" else None, order="C")  # no view back to front, which torch refuses
    return torch.tensor(array, device=device)


def _columns(values: Any) -> list[tuple[Any, Any]]:
    """Names and dtypes of a frame's columns; none of what is no frame."""
    return list(values.dtypes.items()) if hasattr(values, "select_dtypes") else []


def _described(values: Any) -> str:
    kind = type(values).__name__
    if hasattr(values, "select_dtypes"):
        return f"a {kind} whose columns {[name for name, dtype in _columns(values) if dtype.kind not in 'biuf']} are not numeric"
    shown, dtype = repr(values), getattr(values, "dtype", None)
    kind = kind if dtype is None else f"{kind} of dtype {dtype}"
    return kind if len(shown) > 60 else f"{kind} {shown}"
