"""Ignite: idist.Parallel with a backend it knows (it refuses other names), an Engine and a distributed metric."""

import ignite.distributed as idist
import torch
import watched
from ignite.engine import Engine, Events
from ignite.metrics import MeanSquaredError
from torch.utils.data import TensorDataset


def training(_local_rank):
    model = idist.auto_model(watched.perceptron())
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=1e-2))
    torch.manual_seed(7)
    loader = idist.auto_dataloader(TensorDataset(*watched.data()), batch_size=8, shuffle=False)
    losses = []

    def step(_engine, batch):
        optimizer.zero_grad()
        predicted = model(batch[0])
        loss = torch.nn.functional.mse_loss(predicted, batch[1])
        loss.backward()
        optimizer.step()
        losses.append(idist.all_reduce(loss.detach().clone()) / idist.get_world_size())
        return predicted.detach(), batch[1]

    trainer = Engine(step)
    MeanSquaredError().attach(trainer, "mse")
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: losses.append(trainer.state.metrics["mse"]))
    trainer.run(loader, max_epochs=2)
    gathered = idist.all_gather(f"rank {idist.get_rank()}")
    assert gathered == ["rank 0", "rank 1"], gathered
    watched.report(losses, model.parameters(), processes=idist.get_world_size())


with idist.Parallel(backend=watched.NAMED or "gloo") as parallel:
    parallel.run(training)
