"""FSDP2 on all ranks: train three steps and save, or restore, and write whole tensors as seen.

``torchrun ... checkpoint_ranks.py train|restore DIRECTORY FILE``
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from tests.test_checkpoint import decoder, tensors_of, train
from trainer.checkpoint import Writer, restore

what, directory, file = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
dist.init_process_group("gloo")
model = decoder()
for block in model.layers:
    fully_shard(block)
fully_shard(model)
register_fsdp_forward_method(model, "loss")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if what == "train":
    train(model, optimizer)
    writer = Writer(directory, 1)
    writer.save(directory / "step-000003", tensors_of(model, optimizer), {"step": 3})
    writer.wait()
else:
    for parameter in model.parameters():
        parameter.data.zero_()
    restore(model, optimizer, directory / "step-000003")
whole = {
    name: value.full_tensor() if isinstance(value, DTensor) else value.clone()
    for name, value in tensors_of(model, optimizer).items()
    if isinstance(value, DTensor) or not dist.get_rank()
}
if not dist.get_rank():
    torch.save(whole, file)
dist.destroy_process_group()
