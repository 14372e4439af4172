"""Sample calls, refusals, padding and cost of the padding ops."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from thdops.ops.padding import reference
from thdops.registry import Cost, PadRows, Padding, Refusal, Sample

