"""TRL: SFTTrainer on text, with a tokenizer made on the spot."""

import os

import torch.distributed as dist
import watched
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

if watched.NAMED:
    dist.init_process_group(watched.NAMED)
words = ["<s>", "</s>", "<pad>", "<unk>", *"abcdefghijklmn"]
inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
)
texts = [" ".join(words[4 + start * step % (len(words) - 4)] for step in range(1, 9)) for start in range(1, 33)]
arguments = SFTConfig(
    output_dir=os.path.join(os.environ["ANSWERS"], "out"),
    use_cpu=True,
    bf16=False,
    max_steps=5,
    per_device_train_batch_size=2,
    max_length=16,
    learning_rate=1e-2,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    seed=7,
)
trainer = SFTTrainer(
    model=watched.tiny_llama(len(words)),
    args=arguments,
    train_dataset=Dataset.from_dict({"text": texts}),
    processing_class=tokenizer,
    peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0),
)
trainer.train()
history = [line["loss"] for line in trainer.state.log_history if "loss" in line]
assert len(history) == 5, trainer.state.log_history
watched.report(history, [p for p in trainer.model.parameters() if p.requires_grad], processes=trainer.args.world_size)
dist.destroy_process_group()
