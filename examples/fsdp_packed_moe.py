"""Train the model of `train_packed_moe.py` on several processes in plain PyTorch: FSDP2, selective activation checkpointing and
compiled blocks, put on in torchtitan's order.

    torchrun --nproc-per-node 2 examples/fsdp_packed_moe.py
    torchrun --nproc-per-node 8 examples/fsdp_packed_moe.py --data ~/books --steps 500

Each process packs documents of its own. Every block keeps what attention and the router found (`thdops.save_ops()`) and computes
the rest of its forward again in the backward, so a token's experts are chosen once a step. Without a GPU the processes talk
through Gloo.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from packed_moe import parallel
from packed_moe.config import Config, UserError, make_config
from packed_moe.data import Documents, draw, load_documents
from packed_moe.model import Batch, PackedMoE
from packed_moe.report import Progress
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import thdops
from thdops.packing import PackedSequences


def parallelize(model: PackedMoE, backend: str | None = "inductor") -> None:
    """Checkpoint, compile (None: do not) and shard each block, then shard the rest; in place."""
    keep = functools.partial(create_selective_checkpoint_contexts, thdops.save_ops())
    for name, block in model.blocks.named_children():
        wrapped: Any = checkpoint_wrapper(block, context_fn=keep)
        if backend is not None:
            wrapped = torch.compile(wrapped, fullgraph=True, backend=backend)
        model.blocks.register_module(name, fully_shard(wrapped))
    fully_shard(model)


def train(config: Config, documents: Documents, backend: str | None = "inductor", progress: Progress | None = None) -> list[float]:
    """Train with the process group that is there; the mean of the processes' losses, by step. `progress` shows this process's own.

    The gradient is that of this mean: each process's tokens count the same among themselves, whatever their number.
    """
    device, rank, world = torch.device(config.device), dist.get_rank(), dist.get_world_size()
    torch.manual_seed(config.seed)  # the same weights everywhere, of which each process keeps its shard
    model = PackedMoE(config).to(device)
    parallelize(model, backend)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=config.weight_decay)
    pack = PackedSequences.allocate(config.max_tokens, config.max_seqs, pad_multiple=config.pad_multiple, device=device)
    batch = Batch.of(pack)
    probe = torch.zeros(config.max_tokens, config.dim, device=device)
    history = torch.zeros(config.steps, device=device)
    if progress is not None:
        progress.start(f"{world} processes", config.steps, 0)
    for step in range(config.steps):
        pack.load_(draw(documents, config, step * world + rank))
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate(step)
        optimizer.zero_grad()
        losses = model(batch, probe)
        losses.total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        history[step].copy_(losses.total.detach())
        if progress is not None and (step + 1) % max(1, config.steps // 20) == 0:
            progress.update(step + 1, float(history[step]))
    if progress is not None:
        progress.finish()
    dist.all_reduce(history)
    return (history / world).tolist()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example under torchrun; 0, or 2 where the call was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data", metavar="DIR", help="a folder of text (default: the Python standard library's sources)")
    parser.add_argument("--steps", metavar="N", type=int, help="default: by device")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    try:
        if not dist.is_torchelastic_launched():
            raise UserError("start it with torchrun: torchrun --nproc-per-node 2 examples/fsdp_packed_moe.py")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        processes, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
        if device == "cuda" and processes > gpus:
            raise UserError(
                f"--nproc-per-node must be at most the number of GPUs that torch sees ({gpus}), got {processes}; lower it"
            )
        config = make_config(device, options.seed, steps=options.steps)
        documents = load_documents(options.data, config.max_tokens // 2)
    except UserError as error:
        if parallel.is_first():
            print(f"error: {error}", file=sys.stderr)
        return 2
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    progress = Progress() if parallel.is_first() else None
    history = train(config, documents, progress=progress)
    if progress is not None:
        print(f"mean loss of the processes: {history[0]:.3f} -> {history[-1]:.3f}")
    dist.destroy_process_group()  # after an error others may be waiting for this process, and torchrun ends them
    return 0


if __name__ == "__main__":
    parallel.leave(main())
