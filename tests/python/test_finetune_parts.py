"""The parts of examples/finetune.py that need no group: text, the tiny model, checksums, the report."""

from __future__ import annotations

import dataclasses
import json
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

for needed in ("matplotlib", "peft", "tokenizers", "tqdm", "transformers"):
    pytest.importorskip(needed)

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))  # as torchrun does for a script in that folder
try:
    import report
    import text_data
    import tiny_model
    import world
finally:
    sys.path.remove(str(EXAMPLES))

SMALL = dataclasses.replace(tiny_model.Recipe(), vocabulary=300, corpus_characters=20_000, steps=2, hidden=16, layers=1)


class Characters:
    """A tokenizer of one token per character."""

    eos_token_id = 0
    chat_template = None

    def __call__(self, documents, **_):
        return {"input_ids": [[ord(character) for character in document] for document in documents]}


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


# ---- reading ----


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ({"text": "all of it", "id": 7}, "all of it"),
        ({"prompt": "2+2=", "completion": "4"}, "2+2=4"),
        (
            {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
            "user: hi\nassistant: ho",
        ),
        ({"text": "line separator\u2028inside"}, "line separator\u2028inside"),
    ],
)
def test_each_form_of_json_line_becomes_text(tmp_path, line, text):
    path = write(tmp_path, "data.jsonl", "\n" + json.dumps(line, ensure_ascii=False) + "\n\n")
    assert text_data.render(text_data.read_records(path), Characters()) == [text]


def test_conversation_is_laid_out_by_the_tokenizers_template():
    tokenizer = SimpleNamespace(chat_template="x", apply_chat_template=lambda messages, tokenize: f"<{len(messages)}>")
    assert text_data.render(["plain", [{"role": "user", "content": "hi"}]], tokenizer) == ["plain", "<1>"]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("{not json", "not a JSON object on one line"),
        ("[1, 2]", "found a list"),
        ("3", "found a int"),
        ('{"question": "?", "answer": "!"}', "an object with ['answer', 'question']"),
        ('{"text": 3}', "an object with ['text']"),
        ('{"prompt": "no completion"}', "an object with ['prompt']"),
        ('{"messages": []}', "an object with ['messages']"),
        ('{"messages": [{"role": "user"}]}', "an object with ['messages']"),
    ],
)
def test_wrong_json_line_is_named_with_what_is_allowed(tmp_path, line, found):
    path = write(tmp_path, "data.jsonl", '{"text": "fine"}\n' + line + "\n")
    with pytest.raises(text_data.DataError) as error:
        text_data.read_records(path)
    assert str(error.value).startswith(f"{path}:2: ")
    assert found in str(error.value)


def test_unreadable_file_is_named(tmp_path):
    with pytest.raises(text_data.DataError, match=r"absent\.txt: cannot be read"):
        text_data.read_records(tmp_path / "absent.txt")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(text_data.DataError, match=r"binary\.txt: cannot be read as UTF-8"):
        text_data.read_records(tmp_path / "binary.txt")


@pytest.mark.parametrize("border", ["\n", "\n\n"])
@pytest.mark.parametrize("pieces", [30, 3000])
def test_text_file_is_cut_without_losing_a_word(tmp_path, border, pieces):
    text = border.join(f"piece {number}" for number in range(pieces))
    parts = text_data.read_records(write(tmp_path, "data.txt", text))
    assert len(parts) > 1
    assert border.join(parts) == text


# ---- splitting and cutting ----


def test_default_text_has_no_held_out_paragraph_in_training():
    train, held_out = text_data.split(text_data.render(text_data.read_records(None), Characters()))
    trained_on = {paragraph.strip() for document in train for paragraph in document.split("\n\n")}
    judged_on = {paragraph.strip() for document in held_out for paragraph in document.split("\n\n")}
    assert len(judged_on) > 20
    assert not trained_on & judged_on
    share = sum(map(len, held_out)) / sum(map(len, held_out + train))
    assert 0.1 <= share < 0.3


def test_split_is_the_same_every_time_and_counts_equal_documents_once():
    documents = [f"document {number}" for number in range(50)]
    train, held_out = text_data.split(documents)
    assert (train, held_out) == text_data.split(documents + documents + [" "])
    assert sorted(train + held_out) == sorted(documents)


@pytest.mark.parametrize("documents", [[], ["one"], ["one", "one", " \n"]])
def test_split_of_fewer_than_two_documents_is_refused(documents):
    with pytest.raises(text_data.DataError, match=r"at least 2 are needed"):
        text_data.split(documents)


def test_blocks_are_the_stream_in_order_with_an_end_after_each_document():
    blocks = text_data.to_blocks(["abc", "de", "f"], Characters(), 4)
    assert blocks.tolist() == [[97, 98, 99, 0], [100, 101, 0, 102]]


def test_text_shorter_than_a_block_is_refused_with_the_next_step():
    with pytest.raises(text_data.DataError, match=r"4 tokens do not fill one block of 5\. Try: a smaller"):
        text_data.to_blocks(["abc"], Characters(), 5)


def test_order_shows_every_block_once_per_epoch_and_depends_on_the_seed():
    drawn = list(islice(text_data.endless_order(7, seed=1), 21))
    assert [sorted(drawn[start : start + 7]) for start in (0, 7, 14)] == [list(range(7))] * 3
    assert drawn == list(islice(text_data.endless_order(7, seed=1), 21))
    assert drawn != list(islice(text_data.endless_order(7, seed=2), 21))


# ---- the tiny model ----


def test_tiny_tokenizer_gives_any_text_back():
    tokenizer = tiny_model.train_tokenizer(tiny_model.standard_library(SMALL), SMALL)
    text = "def f(x):\n\treturn  x  # grüße, 你好 \U0001f600\r\n\x00"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert (len(tokenizer), tokenizer.eos_token_id) == (SMALL.vocabulary, 0)


def test_tiny_model_is_made_once_and_loads_as_any_other(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tiny_model.ensure_tiny(tmp_path / "cache", SMALL)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]  # nothing half-written beside it
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.get_input_embeddings().weight.shape == (len(tokenizer), SMALL.hidden)

    monkeypatch.setattr(tiny_model, "pretrain", lambda *_: pytest.fail("made a second time"))
    assert tiny_model.ensure_tiny(tmp_path / "cache", SMALL) == folder


def test_failure_while_making_tiny_leaves_no_folder(tmp_path, monkeypatch):
    from transformers import Qwen3ForCausalLM

    def full_disk(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(Qwen3ForCausalLM, "save_pretrained", full_disk)
    with pytest.raises(OSError, match="no space left"):
        tiny_model.ensure_tiny(tmp_path, SMALL)
    assert not list(tmp_path.iterdir())


def test_process_that_finishes_second_takes_the_folder_of_the_first(tmp_path, monkeypatch):
    first = tmp_path / f"tiny-{tiny_model.cache_key(SMALL)}"

    def meanwhile(*arguments):
        model = pretrain(*arguments)
        first.mkdir()
        (first / "config.json").write_text("the first one's")
        return model

    pretrain = tiny_model.pretrain
    monkeypatch.setattr(tiny_model, "pretrain", meanwhile)
    assert tiny_model.ensure_tiny(tmp_path, SMALL) == first
    assert (first / "config.json").read_text() == "the first one's"
    assert list(tmp_path.iterdir()) == [first]


def test_cache_folder_follows_xdg(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert tiny_model.default_cache() == Path("/somewhere/torch-iroh")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert tiny_model.default_cache() == Path.home() / ".cache" / "torch-iroh"


# ---- checksums and report ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checksum_sees_every_bit_the_name_and_the_shape(dtype):
    tensor = torch.linspace(-1, 1, 12).to(dtype)
    same = world.checksum([("w", tensor)])
    assert same == world.checksum([("w", tensor.clone().requires_grad_())])
    assert -(2**63) <= same < 2**63
    zero, negative_zero = torch.zeros(1, dtype=dtype), -torch.zeros(1, dtype=dtype)
    assert world.checksum([("w", zero)]) != world.checksum([("w", negative_zero)])
    assert same != world.checksum([("v", tensor)])
    assert same != world.checksum([("w", tensor.view(3, 4))])
    assert world.checksum([("w", torch.tensor(3.0))]) != world.checksum([("w", torch.tensor(4.0))])


def result(checksums, stats=None, sent=(-1, -1), share=None) -> report.Result:
    steps = [report.Step(number, 1 / 3, 0.5, 100.0, share, None) for number in (1, 2)]
    return report.Result(steps, report.rank_rows(stats, checksums, sent), 5.0, 4.5)


def test_table_shows_a_dash_for_what_the_backend_does_not_measure():
    table = report.closing_table(result([-1, -1]))
    assert table.splitlines()[1].split() == ["0", "this", "process", "-", "-", "f" * 16]
    assert table.splitlines()[2].split() == ["1", "-", "-", "-", "f" * 16]
    assert "communication   not measured" in table
    assert "parameters      equal on all ranks" in table


def test_table_shows_paths_and_bytes_where_measured():
    peer = SimpleNamespace(rank=1, path="direct 127.0.0.1:40123", rtt_ms=0.314)
    table = report.closing_table(result([1, 1], SimpleNamespace(peers=[peer]), sent=(2_000_000, 3_500_000), share=0.25))
    assert table.splitlines()[2].split() == ["1", "direct", "127.0.0.1:40123", "0.31", "3.50", "0" * 15 + "1"]
    assert "communication   25% of the time" in table
    assert "tokens/s        100 (2 steps in 1.0 s)" in table


def test_different_parameters_are_said_and_not_equal():
    differing = result([1, 2])
    assert not report.equal(differing.ranks)
    assert "DIFFER BETWEEN RANKS" in report.closing_table(differing)


def test_metrics_line_keeps_every_bit_of_the_loss(tmp_path):
    with open(tmp_path / "metrics.jsonl", "w") as file:
        report.write_step(file, report.Step(1, 1 / 3, 0.5, 100.0, None, None))
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line["loss"] == 1 / 3
    assert line["communication_share"] is None


def test_traffic_counts_from_lap_to_lap(monkeypatch):
    counters = iter([(10, 1.0), (25, 1.5)])

    def stats():
        sent, busy = next(counters)
        return SimpleNamespace(bytes_sent=sent, busy_seconds=busy)

    monkeypatch.setitem(sys.modules, "torch_iroh", SimpleNamespace(stats=stats))
    times = iter([100.0, 102.0])
    monkeypatch.setattr(report.time, "perf_counter", lambda: next(times))
    assert report.Traffic("iroh").lap() == (2.0, 0.25, 15)
    times = iter([100.0, 102.0])
    assert report.Traffic("gloo").lap() == (2.0, None, None)


def test_loss_is_drawn(tmp_path):
    report.plot_loss(result([1, 1]), "title", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
