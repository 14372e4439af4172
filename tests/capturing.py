"""CUDA graphs of a call, as tests of several files want them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def captured(call: Callable[[], Any], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Any]:
    """`call` as a CUDA graph, and what a replay writes; nothing in it may synchronise."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        results = call()
    return graph, results
