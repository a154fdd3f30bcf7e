"""The default base model: a Qwen3 of a million parameters and its tokenizer, made on this machine from text that
comes with Python, and kept in a cache folder. Downloads nothing; knows nothing of ranks.

    folder = ensure_tiny(default_cache())  # then AutoModelForCausalLM.from_pretrained(folder)
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import random
import shutil
import sysconfig
import tempfile
from pathlib import Path
from typing import Any, cast

import report
import tokenizers
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

END_OF_TEXT = "<|endoftext|>"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything the result depends on besides versions: the cache is keyed by it."""

    vocabulary: int = 2048
    hidden: int = 128
    layers: int = 2
    feed_forward: int = 384
    context: int = 2048
    corpus_characters: int = 3_000_000
    steps: int = 500
    batch: int = 4
    length: int = 128
    lr: float = 2e-3
    seed: int = 0


def default_cache() -> Path:
    """$XDG_CACHE_HOME/torch-iroh, or ~/.cache/torch-iroh."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch-iroh"


def config(recipe: Recipe) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=recipe.vocabulary,
        hidden_size=recipe.hidden,
        num_hidden_layers=recipe.layers,
        intermediate_size=recipe.feed_forward,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=recipe.hidden // 4,
        max_position_embeddings=recipe.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        use_cache=False,
    )


def ensure_tiny(cache: Path, recipe: Recipe = Recipe()) -> Path:
    """The folder with model and tokenizer in Hugging Face's format; made now, in about half a minute, if absent.

    A folder under its final name is always complete: it is written aside and renamed, and of two processes that make
    the same one the later keeps the earlier's.
    """
    folder = cache / f"tiny-{cache_key(recipe)}"
    if folder.is_dir():
        return folder
    corpus = standard_library(recipe)
    tokenizer = train_tokenizer(corpus, recipe)
    model = pretrain(corpus, tokenizer, recipe)

    cache.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".tiny-", dir=cache))
    try:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        aside.chmod(0o755)  # mkdtemp's 0700 would follow into a cache that several users share
        aside.rename(folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process was faster
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def cache_key(recipe: Recipe) -> str:
    versions = [platform.python_version(), torch.__version__, transformers.__version__, tokenizers.__version__]
    return hashlib.sha256(json.dumps([dataclasses.asdict(recipe), versions]).encode()).hexdigest()[:12]


def standard_library(recipe: Recipe) -> list[str]:
    """Source files of the standard library in a fixed random order, `recipe.corpus_characters` in all.

    Without pydoc_data: that is the text the fine-tune is judged on.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}
    files = sorted(file for file in root.rglob("*.py") if not skipped & set(file.relative_to(root).parts))
    random.Random(recipe.seed).shuffle(files)
    corpus: list[str] = []
    missing = recipe.corpus_characters
    for file in files:
        if missing <= 0:
            break
        corpus.append(file.read_text(encoding="utf-8", errors="ignore")[:missing])
        missing -= len(corpus[-1])
    if not corpus:
        raise FileNotFoundError(
            f"no Python source below {root} to make the tiny model from. Try: --model <hub id or path>"
        )
    return corpus


def train_tokenizer(corpus: list[str], recipe: Recipe) -> PreTrainedTokenizerFast:
    """Byte-level BPE: any text survives encode and decode."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary,
        special_tokens=[END_OF_TEXT],  # so its id is 0, as config() says
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(corpus, trainer)
    fast: Any = PreTrainedTokenizerFast  # its constructor has no types
    return cast(
        PreTrainedTokenizerFast,
        fast(tokenizer_object=bpe, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False),
    )


def pretrain(corpus: list[str], tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> Qwen3ForCausalLM:
    """A few hundred steps at random places of the corpus: enough that fine-tuning starts from something."""
    encoded = tokenizer.backend_tokenizer.encode_batch([text + END_OF_TEXT for text in corpus])
    stream = torch.tensor([token for text in encoded for token in text.ids])
    generator = torch.Generator().manual_seed(recipe.seed)
    torch.manual_seed(recipe.seed)
    model = Qwen3ForCausalLM(config(recipe))
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.lr, total_steps=recipe.steps, pct_start=0.1)
    bar = report.progress(recipe.steps, "pre-training tiny, once")
    for _ in range(recipe.steps):
        starts = torch.randint(len(stream) - recipe.length, (recipe.batch,), generator=generator)
        batch = torch.stack([stream[start : start + recipe.length] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        bar.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)
        bar.update()
    bar.close()
    return model
