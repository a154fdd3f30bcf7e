"""DeepSpeed: ZeRO stages 1, 2 and 3 on CPU."""

import deepspeed
import torch
import torch.distributed as dist
import watched

# Its own all_reduce for inference, which it would compile now.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed(dist_backend=watched.NAMED or None)
inputs, targets = watched.data()
rank, count = dist.get_rank(), dist.get_world_size()
losses, parameters = [], []
for stage in (1, 2, 3):
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1000,
    }
    model = watched.perceptron()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    for step in range(4):
        rows = slice((step * count + rank) * 4, (step * count + rank) * 4 + 4)
        loss = torch.nn.functional.mse_loss(engine(inputs[rows]), targets[rows])
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean / count)
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        parameters += [parameter.detach().clone() for parameter in model.parameters()]
    engine.destroy()
watched.report(losses, parameters, processes=count)
dist.destroy_process_group()
