"""Accelerate: prepare, gather_for_metrics, reduce, broadcast_object_list, with the state that a user sees."""

import torch
import torch.distributed as dist
import watched
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from torch.utils.data import DataLoader, TensorDataset

if watched.NAMED:  # Accelerate takes a group that is there
    dist.init_process_group(watched.NAMED)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(7)
inputs, targets = watched.data(30)  # not a multiple of the batches: the gather drops what was padded
model = watched.perceptron()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses, seen = [], 0
for _ in range(2):
    for batch, target in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(batch), target)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        seen += len(accelerator.gather_for_metrics(target))
        losses.append(accelerator.reduce(loss.detach(), "mean"))
objects = broadcast_object_list([accelerator.process_index, {"from": "rank 0"}])
accelerator.wait_for_everyone()
assert objects == [0, {"from": "rank 0"}]
assert seen == 60, seen
watched.report(losses, model.parameters(), processes=accelerator.num_processes)
accelerator.end_training()
