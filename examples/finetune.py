"""LoRA fine-tune of a Hugging Face causal language model with DistributedDataParallel over iroh.

One machine, two ranks, nothing downloaded (a tiny Qwen3 made here, on Python's own reference pages):

    torchrun --nproc-per-node=2 examples/finetune.py

Two machines, the first at 192.0.2.10 (torchrun passes it on as MASTER_ADDR); one line on each:

    torchrun --nnodes=2 --node-rank=0 --master-addr=192.0.2.10 --master-port=29500 examples/finetune.py
    torchrun --nnodes=2 --node-rank=1 --master-addr=192.0.2.10 --master-port=29500 examples/finetune.py

A real model and your own text (text file, or JSON lines with `text`, `prompt` + `completion` or `messages`; the loss
counts all tokens of it; only rank 0 reads the file):

    torchrun --nproc-per-node=2 examples/finetune.py --model Qwen/Qwen3-0.6B --data my.jsonl --dtype bfloat16

The same run with the backend to compare with; at two ranks every loss is equal to the last bit:

    torchrun --nproc-per-node=2 examples/finetune.py --backend gloo --output runs/finetune-gloo

Needs torch, transformers, peft and matplotlib. Leaves in --output the adapter in peft's format, metrics.jsonl and
loss.png. torchrun exits 0 only if every rank ends with equal parameters.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import peft
import report
import text_data
import tiny_model
import torch
import torch.distributed as dist
import transformers
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from world import Place, all_gather_int, broadcast_rows, checksum, mean_over_ranks, sum_over_ranks


def parse_arguments() -> argparse.Namespace:
    summary, _, commands = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=commands, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--backend", choices=["iroh", "gloo"], default="iroh", help="what carries torch.distributed (default: iroh)")
    add("--model", default="tiny", help="hub id or local folder (default: tiny, made on this machine)")
    add("--data", type=Path, help="text file or JSON lines (default: Python's reference pages, pydoc_data.topics)")
    add("--output", type=Path, default=Path("runs/finetune"), help="folder to write (default: %(default)s)")
    add("--cache", type=Path, default=tiny_model.default_cache(), help="where `tiny` is kept (default: %(default)s)")
    add("--steps", type=positive(int), default=150, help="optimizer steps (default: %(default)s)")
    add("--batch-size", type=positive(int), default=4, help="blocks per rank and pass (default: %(default)s)")
    add("--gradient-accumulation", type=positive(int), default=1, help="passes per step (default: %(default)s)")
    add("--sequence-length", type=positive(int), default=128, help="tokens per block (default: %(default)s)")
    add("--lr", type=positive(float), help="peak learning rate (default: 1e-2 for tiny, else 2e-4)")
    add("--lora-rank", type=positive(int), default=16, help="rank of the adapter's matrices (default: %(default)s)")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the base; the adapter is float32")
    add("--device", choices=["cpu", "cuda"], help="(default: cuda if torch sees a GPU, else cpu)")
    add("--threads", type=positive(int), help="torch threads (default: cores / ranks on this machine - 1)")
    add("--seed", type=int, default=0, help="of the adapter's start and the order of blocks (default: %(default)s)")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node=2 examples/finetune.py")
    if args.sequence_length < 2:
        parser.error("--sequence-length: at least 2, a block of one token has nothing to predict")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here")
    if args.device is None:
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.lr is None:
        args.lr = 1e-2 if args.model == "tiny" else 2e-4
    return args


def positive(kind: Any) -> Any:
    def convert(text: str) -> Any:
        value = kind(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"must be greater than 0, got {text}")
        return value

    convert.__name__ = kind.__name__  # argparse says "invalid int value" with it
    return convert


@record  # lets torchrun name the first rank that failed, with its traceback
def main() -> None:
    args = parse_arguments()
    place = Place.from_environment(args.device, args.threads)
    hugging_face: Any = transformers.logging  # has no types
    if place.rank != 0:
        hugging_face.set_verbosity_error()  # rank 0 speaks for all
    if place.rank != 0 or args.model == "tiny":
        hugging_face.disable_progress_bar()  # of downloads and loading
    # peft still uses names that transformers renames: nothing the reader of this run can act on.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    # Before the group exists: a wrong file fails rank 0 alone, without complaints of ranks that wait for it.
    records = text_data.read_records(args.data) if place.rank == 0 else []
    dist.init_process_group(args.backend)
    try:
        equal = finetune(args, place, records)
    finally:
        dist.destroy_process_group()
    if not equal:
        sys.exit(1)


def finetune(args: argparse.Namespace, place: Place, records: list[text_data.Record]) -> bool:
    """The whole run on this rank. True if all ranks end with equal parameters."""
    traffic = report.Traffic(args.backend)
    base, tokenizer = load_base(args, place)
    train, held_out = share_blocks(args, tokenizer, records)
    model = add_adapter(args, place, base)
    before = held_out_loss(model, held_out, args.batch_size, place)
    steps = list(training_steps(args, place, model, train, traffic))
    after = held_out_loss(model, held_out, args.batch_size, place)
    result = gather_result(place, model, steps, traffic, before, after)
    if place.rank == 0:
        write_results(args, model, result)
    return report.equal(result.ranks)


def load_base(args: argparse.Namespace, place: Place) -> tuple[Any, Any]:
    """The frozen model, and on rank 0 its tokenizer. `tiny` exists on rank 0 only: DDP sends it to the others."""
    dtype = getattr(torch, args.dtype)
    auto: Any = transformers.AutoModelForCausalLM  # from_config has no types
    if args.model == "tiny" and place.rank != 0:
        # from_config and not .to(dtype), which would round the float32 tables of the rotary embedding too.
        return auto.from_config(tiny_model.config(tiny_model.Recipe()), dtype=dtype), None
    name = tiny_model.ensure_tiny(args.cache) if args.model == "tiny" else args.model
    tokenizer = transformers.AutoTokenizer.from_pretrained(name) if place.rank == 0 else None
    return auto.from_pretrained(name, dtype=dtype), tokenizer


def share_blocks(
    args: argparse.Namespace, tokenizer: Any, records: list[text_data.Record]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(train, held out). Rank 0 tokenizes and sends: machines with other files or another Python train on one text."""
    if tokenizer is None:
        return broadcast_rows(None), broadcast_rows(None)
    documents = text_data.split(text_data.render(records, tokenizer))
    train, held_out = [text_data.to_blocks(part, tokenizer, args.sequence_length) for part in documents]
    return broadcast_rows(train), broadcast_rows(held_out)


def add_adapter(args: argparse.Namespace, place: Place, base: Any) -> DistributedDataParallel:
    context = getattr(base.config, "max_position_embeddings", None)
    if context is not None and args.sequence_length > context:
        raise ValueError(f"--sequence-length {args.sequence_length}: {args.model} reads at most {context} tokens")
    torch.manual_seed(args.seed)  # the adapter starts equal on all ranks
    # No dropout: the loss then depends on the seed and the data alone.
    lora = peft.LoraConfig(
        r=args.lora_rank, lora_alpha=2 * args.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    adapted: torch.nn.Module = peft.get_peft_model(base, lora).to(place.device)
    # init_sync sends the whole model from rank 0. A model from the hub is everywhere already, only compare it then:
    # gigabytes over a home uplink take hours.
    model = DistributedDataParallel(adapted, init_sync=args.model == "tiny")
    sums = all_gather_int(checksum(model.named_parameters()))
    for rank, value in enumerate(sums):
        if value != sums[0]:
            raise RuntimeError(
                f"rank {rank} loaded other weights of {args.model} than rank 0. Try: the same revision on every machine"
            )
    return model


@torch.no_grad()
def held_out_loss(model: DistributedDataParallel, blocks: torch.Tensor, batch_size: int, place: Place) -> float:
    """Mean over all held-out blocks, each seen by one rank. A rank may have fewer blocks or none: without DDP's
    wrapper a forward pass waits for nobody.
    """
    model.eval()
    mine = blocks[place.rank :: place.world].to(place.device)
    total = sum(mean_loss(model.module, batch).item() * len(batch) for batch in batches(mine, batch_size))
    total, count = sum_over_ranks([total, len(mine)])
    return total / count


def batches(blocks: torch.Tensor, size: int) -> list[torch.Tensor]:
    return [blocks[start : start + size] for start in range(0, len(blocks), size)]


def mean_loss(model: torch.nn.Module, batch: torch.Tensor) -> Any:
    """Over all predicted tokens; every block predicts all but its first."""
    return model(input_ids=batch, labels=batch, use_cache=False).loss


def training_steps(
    args: argparse.Namespace,
    place: Place,
    model: DistributedDataParallel,
    blocks: torch.Tensor,
    traffic: report.Traffic,
) -> Iterator[report.Step]:
    """Trains; yields each step after showing and writing it on rank 0."""
    torch.nn.Module.train(model)  # not model.train(): DDP's own has no types
    adapter = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapter, lr=args.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: warmup_then_cosine(done, args.steps))
    order = text_data.endless_order(len(blocks), args.seed)
    blocks_per_step = place.world * args.batch_size * args.gradient_accumulation

    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(report.progress(args.steps, "fine-tuning", shown=place.rank == 0))
        if place.rank == 0:
            args.output.mkdir(parents=True, exist_ok=True)
            metrics = stack.enter_context(open(args.output / "metrics.jsonl", "w", encoding="utf-8"))
        traffic.lap()
        for number in range(1, args.steps + 1):
            # All ranks draw the same indices; each takes every world-th.
            mine = list(islice(order, blocks_per_step))[place.rank :: place.world]
            loss = mean_over_ranks(accumulate_gradients(args, model, blocks[mine].to(place.device)))
            if not math.isfinite(loss):
                raise FloatingPointError(f"step {number}: the loss is {loss}. Try: an --lr below {args.lr:g}")
            torch.nn.utils.clip_grad_norm_(adapter, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            seconds, share, sent = traffic.lap()
            tokens_per_s = blocks_per_step * args.sequence_length / seconds
            step = report.Step(number, loss, seconds, tokens_per_s, share, sent)
            if place.rank == 0:
                report.show_step(bar, step, traffic.bytes_sent())
                report.write_step(metrics, step)
            yield step


def accumulate_gradients(args: argparse.Namespace, model: DistributedDataParallel, blocks: torch.Tensor) -> float:
    """Backward through all passes of a step; gradients travel with the last one. This rank's mean loss."""
    loss = 0.0
    passes = batches(blocks, args.batch_size)
    for index, batch in enumerate(passes, start=1):
        with contextlib.nullcontext() if index == len(passes) else model.no_sync():
            part = mean_loss(model, batch) / len(passes)
            part.backward()
        loss += part.item()
    return loss


def warmup_then_cosine(done: int, steps: int) -> float:
    """Factor of the peak learning rate: up over a tenth of the steps, then down to a tenth of the peak."""
    warmup = max(1, steps // 10)
    if done < warmup:
        return (done + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (done - warmup) / max(1, steps - warmup))


def gather_result(
    place: Place,
    model: DistributedDataParallel,
    steps: list[report.Step],
    traffic: report.Traffic,
    before: float,
    after: float,
) -> report.Result:
    sent = traffic.bytes_sent()  # before the collectives below add to it
    sums = all_gather_int(checksum((n, p) for n, p in model.named_parameters() if p.requires_grad))
    sent_by_rank = all_gather_int(-1 if sent is None else sent)
    return report.Result(steps, report.rank_rows(traffic.now(), sums, sent_by_rank), before, after)


def write_results(args: argparse.Namespace, model: DistributedDataParallel, result: report.Result) -> None:
    # The base's embeddings are frozen: without this, peft asks the hub whether they changed.
    model.module.save_pretrained(args.output, save_embedding_layers=False)
    title = f"LoRA fine-tune of {args.model}, {len(result.ranks)} ranks over {args.backend}"
    report.plot_loss(result, title, args.output / "loss.png")
    print(f"\n{title}\n\n{report.closing_table(result)}")
    print(f"written         {args.output}: adapter_model.safetensors, metrics.jsonl, loss.png", flush=True)


if __name__ == "__main__":
    main()
