"""One linear layer per expert, over rows that `thdops.permute_tokens` has sorted by expert.

N rows (T * K), E experts, D columns in, F columns out. Expert e's rows are [offsets[e-1], offsets[e]); from offsets[E-1] on a row
is nobody's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """`x[n] @ weight[e]` for each row n of each expert e: `[N, D]`, `[E, D, F]` and int32 `[E]` give `[N, F]`, in the dtype of x.

    Nobody's rows of x are not read. Those of the result and of x's gradient may hold anything: `unpermute_tokens` and the gradient
    of `permute_tokens` do not read them.
    """
    weight = weight.to(x.dtype)
    if _has_grouped_mm(x):
        return F.grouped_mm(x, weight, offs=offsets)
    # One product over all experts' columns, E times the work: each row stands in its own expert's columns, zeros in the others'.
    row = torch.arange(x.shape[0], device=x.device)[:, None]
    own = (row >= F.pad(offsets[:-1], (1, 0))) & (row < offsets)  # [N, E]
    spread = torch.where(own[:, :, None], x[:, None, :], 0)  # [N, E, D]
    return spread.flatten(1) @ weight.flatten(0, 1)


def _has_grouped_mm(x: Tensor) -> bool:
    """Whether torch has a kernel for this: elsewhere `grouped_mm` reads the offsets on the host, which cannot be captured."""
    return x.is_cuda and x.dtype == torch.bfloat16 and torch.cuda.get_device_properties(x.device).major in (9, 10)
