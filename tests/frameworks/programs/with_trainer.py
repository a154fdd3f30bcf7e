"""Hugging Face Trainer with LoRA by peft, evaluation and a save in the middle."""

import os

import torch
import torch.distributed as dist
import watched
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments

if watched.NAMED:  # Trainer takes a group that is there
    dist.init_process_group(watched.NAMED)
model = get_peft_model(watched.tiny_llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))
generator = torch.Generator().manual_seed(3)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(2, 64, (32, 12), generator=generator)]
arguments = TrainingArguments(
    output_dir=os.path.join(os.environ["ANSWERS"], "out"),
    use_cpu=True,
    ddp_backend="gloo",  # what the documentation shows; "iroh" is not among its choices
    max_steps=6,
    per_device_train_batch_size=2,
    learning_rate=1e-2,
    logging_steps=1,
    eval_strategy="steps",
    eval_steps=3,
    save_strategy="steps",
    save_steps=6,
    report_to=[],
    disable_tqdm=True,
    dataloader_num_workers=0,
    seed=7,
)
trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:10])
trainer.train()
history = [line[key] for line in trainer.state.log_history for key in ("loss", "eval_loss") if key in line]
assert len(history) == 8, trainer.state.log_history
watched.report(history, [p for p in model.parameters() if p.requires_grad], processes=arguments.world_size)
dist.destroy_process_group()
