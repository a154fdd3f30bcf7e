"""Lightning: DDPStrategy, a prepare_data hook (for which it opens a gloo group of its own), validation of integers."""

import os

import lightning
import torch
import watched
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = watched.perceptron()
        self.losses = []

    def prepare_data(self):
        self.prepared = True

    def training_step(self, batch, _):
        loss = torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.losses.append(self.all_gather(loss.detach()).mean())
        return loss

    def validation_step(self, batch, _):
        self.log("error", torch.nn.functional.l1_loss(self.layers(batch[0]), batch[1]), sync_dist=True)
        self.log("positive", (batch[1] > 0).sum(), sync_dist=True, reduce_fx="sum")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_train_end(self):
        watched.report(
            [*self.losses, self.trainer.callback_metrics["error"], self.trainer.callback_metrics["positive"]],
            self.parameters(),
            processes=self.trainer.world_size,
        )


lightning.seed_everything(7)
data = TensorDataset(*watched.data())
named = {"process_group_backend": watched.NAMED} if watched.NAMED else {}
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=DDPStrategy(**named),
    max_epochs=2,
    enable_progress_bar=False,
    enable_model_summary=False,
    logger=False,
    default_root_dir=os.environ["ANSWERS"],
)
trainer.fit(Regression(), DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=4))
