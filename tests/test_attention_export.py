"""`torch.export` of a module that calls `thdops.attention`: the op stays one node, through decompositions, saving and loading."""

from __future__ import annotations

import io

import pytest
import torch
from attention_oracle import GAPS, TAIL, Case, numbers
from torch import Tensor, nn

import thdops

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")


class _Layer(nn.Module):
    """Attention with a sink under autocast, as a model has it; hints and the LSE leave no trace."""

    def __init__(self) -> None:
        super().__init__()
        self.sink = nn.Parameter(torch.ones(4))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cu: Tensor, padded: Tensor) -> tuple[Tensor, Tensor]:
        options = {"causal": True, "softmax": "learnable", "sink": self.sink, "return_lse": True, "max_seqlen_q": 9}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out, lse = thdops.attention(q, k, v, cu, cu_seqlens_q_padded=padded, **options)
        return out.float(), lse


@pytest.mark.parametrize("strict", [False, True])
def test_the_op_stays_one_node_for_every_size(strict: bool) -> None:
    layer = _Layer()
    rows, sequences = (torch.export.Dim(name, min=2, max=4096) for name in ("rows", "sequences"))

    def example(case: Case) -> tuple[Tensor, ...]:
        cu, padded = case.queries.metadata("cpu")
        return *numbers(case, torch.float32)[:3], cu, cu if padded is None else padded

    shapes = ({0: rows}, {0: rows}, {0: rows}, {0: sequences}, {0: sequences})
    program = torch.export.export(layer, example(Case(GAPS)), dynamic_shapes=shapes, strict=strict)
    file = io.BytesIO()
    torch.export.save(program.run_decompositions(), file)
    file.seek(0)
    loaded = torch.export.load(file)
    targets = [node.target for node in loaded.graph.nodes if "thdops" in str(node.target)]
    assert targets == [torch.ops.thdops.attention.default]
    for case in (Case(GAPS), Case(TAIL)):
        for actual, expected in zip(loaded.module()(*example(case)), layer(*example(case)), strict=True):
            assert torch.equal(actual, expected)
