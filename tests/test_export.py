"""The example's model through `torch.export` and AOTInductor: saved, loaded and run on batches of other sizes.

T rows, B sequences.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import thdops

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from packed_moe import modes
from packed_moe.config import make_config
from packed_moe.model import Batch, PackedMoE

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated", "ignore:`isinstance.treespec, LeafSpec")

SIZES = {"max_tokens": 64, "max_seqs": 4, "dim": 16, "layers": 1, "heads": 2, "kv_heads": 1, "experts": 3, "ffn": 16}
BATCHES = ((64, 4, (17, 9, 24)), (96, 7, (1, 40, 0, 23)), (48, 4, ()))
OPS = ["attention", "padding_mask", "permute_tokens", "positions", "router", "unpermute_tokens", "zero_fill"]


class Packed(nn.Module):
    """The model with tensors for arguments and results, which is what a saved program has; `probe` [T, D] is zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.model = PackedMoE(make_config("cpu", 0, **SIZES))

    def forward(
        self, tokens: Tensor, labels: Tensor, cu_seqlens: Tensor, cu_seqlens_padded: Tensor, num_tokens: Tensor, probe: Tensor
    ) -> tuple[Tensor, ...]:
        return tuple(self.model(Batch(tokens, labels, cu_seqlens, cu_seqlens_padded, num_tokens), probe))


def arguments(rows: int, sequences: int, lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
    pack = thdops.PackedSequences.allocate(rows, sequences, pad_multiple=8)
    pack.load_([torch.randint(256, (length,)) for length in lengths])
    return *Batch.of(pack)[:5], torch.zeros(rows, SIZES["dim"])


def exported(module: Packed, strict: bool) -> ExportedProgram:
    rows, entries = Dim("rows", min=2, max=65536), Dim("entries", min=2, max=4096)
    shapes = ({0: rows}, {0: rows}, {0: entries}, {0: entries}, None, {0: rows})
    return torch.export.export(module, arguments(*BATCHES[0]), dynamic_shapes=shapes, strict=strict)


@pytest.mark.parametrize("strict", [False, True])
def test_a_saved_program_gives_the_models_losses(strict: bool) -> None:
    module, file = Packed(), io.BytesIO()
    torch.export.save(exported(module, strict), file)
    file.seek(0)
    program = torch.export.load(file)
    modules = (part for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule))
    targets = {str(node.target) for part in modules for node in part.graph.nodes}
    assert sorted(name for name in targets if "thdops" in name) == [f"thdops.{name}.default" for name in OPS]
    loaded = program.module()
    for batch in BATCHES:
        given = arguments(*batch)
        for actual, expected in zip(loaded(*given), module(*given), strict=True):
            assert torch.equal(actual, expected)


@pytest.mark.skipif(not modes._cpp_compiler(), reason="AOTInductor needs a C++ compiler")
def test_aot_inductor_in_python_gives_the_models_losses(tmp_path: Path) -> None:
    module = Packed().requires_grad_(False)
    path = torch._inductor.aoti_compile_and_package(exported(module, False), package_path=str(tmp_path / "packed.pt2"))
    loaded = torch._inductor.aoti_load_package(path)
    for batch in BATCHES:
        given = arguments(*batch)
        torch.testing.assert_close(loaded(*given), module(*given), rtol=1e-5, atol=1e-6)
