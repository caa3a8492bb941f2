"""Stand-ins for packages of text: sentences of random words, whose lengths differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

WORDS = [f"word{number}" for number in range(20)]


def sentences(count: int, seed: int, lengths: Sequence[int] = (5, 7)) -> list[str]:
    """Return sentences; all of a run of four have the same length."""
    random = torch.Generator().manual_seed(seed)
    return [
        " ".join(WORDS[i] for i in torch.randint(20, (lengths[number // 4 % len(lengths)],), generator=random))
        for number in range(count)
    ]


def corpus(folder: Path) -> None:
    """Write the text files of a language model."""
    (folder / "corpus").mkdir()
    for seed, (name, count) in enumerate((("train", 40), ("valid", 16), ("test", 16))):
        (folder / "corpus" / f"{name}.txt").write_text("\n".join(sentences(count, seed, (6,))) + "\n")


class Vocabulary:
    """Words and their numbers."""

    def __init__(self, texts: Iterable[Iterable[str]], specials: Sequence[str] = ("<unk>", "<pad>")) -> None:
        counts = Counter(word for words in texts for word in words)
        self.words = [*specials, *sorted(counts)]
        self.numbers = {word: number for number, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def __call__(self, words: Iterable[str]) -> list[int]:
        return [self.numbers[word] for word in words]

    def set_default_index(self, index: int) -> None:
        pass


def build_vocabulary(texts: Any, min_freq: int, specials: Sequence[str], special_first: bool) -> Vocabulary:
    return Vocabulary(texts, specials)


def translations(split: str, language_pair: Any) -> list[tuple[str, str]]:
    count, seed = (12, 10) if split == "train" else (8, 20)
    return list(zip(sentences(count, seed), sentences(count, seed + 1, (6, 6)), strict=True))


# ---- torchtext as it was ---------------------------------------------------------------------------------------------


class Field:
    vocab: Vocabulary

    def __init__(self, lower: bool = True, tokenize: str = "", sequential: bool = True) -> None:
        self.sequential = sequential

    def build_vocab(self, *texts: Any) -> None:
        labels = [["neutral", "entailment", "contradiction"]]
        self.vocab = Vocabulary(
            [WORDS] if self.sequential else labels, ("<unk>", "<pad>") if self.sequential else ("<unk>",)
        )


def pairs_of_sentences(inputs: Field, answers: Field) -> list[Any]:
    return [
        [
            SimpleNamespace(premise=a, hypothesis=b, label=number % 3 + 1)
            for number, (a, b) in enumerate(zip(sentences(count, seed), sentences(count, seed + 1), strict=True))
        ]
        for count, seed in ((12, 30), (8, 40), (8, 50))
    ]


class Batches:
    """Batches as torchtext made them: objects with a tensor, length first, for each field."""

    def __init__(self, samples: Sequence[Any], batch_size: int) -> None:
        self.samples, self.batch_size = samples, batch_size
        self.vocabulary = Vocabulary([WORDS])

    def init_epoch(self) -> None:
        pass

    def __len__(self) -> int:
        return -(-len(self.samples) // self.batch_size)

    def _pad(self, texts: Iterable[str]) -> Tensor:
        return pad_sequence([torch.tensor(self.vocabulary(text.split())) for text in texts], padding_value=1)

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self.samples), self.batch_size):
            chosen = self.samples[start : start + self.batch_size]
            yield SimpleNamespace(
                premise=self._pad(sample.premise for sample in chosen),
                hypothesis=self._pad(sample.hypothesis for sample in chosen),
                label=torch.tensor([sample.label for sample in chosen]),
                batch_size=len(chosen),
            )


def split_batches(sets: Sequence[Any], batch_size: int, device: Any) -> list[Batches]:
    return [Batches(samples, batch_size) for samples in sets]


# ---- Hugging Face's --------------------------------------------------------------------------------------------------


class Table(list[dict[str, Any]]):
    """Rows of named values."""

    def map(self, function: Callable[[Any], Any], batched: bool, remove_columns: Sequence[str]) -> Table:
        columns = function({key: [row[key] for row in self] for key in self[0]})
        kept = [{key: value for key, value in row.items() if key not in remove_columns} for row in self]
        return Table(row | {key: columns[key][i] for key in columns} for i, row in enumerate(kept))

    def rename_column(self, name: str, new_name: str) -> Table:
        return Table({new_name if key == name else key: value for key, value in row.items()} for row in self)


class Tables(dict[str, Table]):
    """Tables by split."""

    def map(self, *args: Any, **kwargs: Any) -> Tables:
        return Tables({name: table.map(*args, **kwargs) for name, table in self.items()})

    def rename_column(self, *args: Any) -> Tables:
        return Tables({name: table.rename_column(*args) for name, table in self.items()})


def load_dataset(*names: str) -> Tables:
    def table(count: int, seed: int) -> Table:
        pairs = zip(sentences(count, seed), sentences(count, seed + 1), strict=True)
        return Table({"idx": i, "sentence1": a, "sentence2": b, "label": i % 2} for i, (a, b) in enumerate(pairs))

    return Tables(train=table(48, 60), validation=table(40, 70))


class Tokenizer:
    vocabulary = Vocabulary([WORDS], ("<pad>", "<cls>", "<sep>"))

    def __call__(self, first: Sequence[str], second: Sequence[str], **options: Any) -> dict[str, list[list[int]]]:
        texts = [["<cls>", *a.split(), "<sep>", *b.split(), "<sep>"] for a, b in zip(first, second, strict=True)]
        types = [[0] * (len(a.split()) + 2) + [1] * (len(b.split()) + 1) for a, b in zip(first, second, strict=True)]
        ids = [self.vocabulary(text) for text in texts]
        return {"input_ids": ids, "token_type_ids": types, "attention_mask": [[1] * len(row) for row in ids]}

    def pad(self, rows: Sequence[dict[str, Any]], **options: Any) -> Any:
        from transformers import BatchEncoding

        columns = {key: [torch.tensor(row[key]) for row in rows] for key in rows[0]}
        return BatchEncoding(
            {
                key: torch.stack(values) if values[0].dim() == 0 else pad_sequence(values, batch_first=True)
                for key, values in columns.items()
            }
        )


def load_classifier(name: str, **options: Any) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForSequenceClassification(BertConfig(vocab_size=len(Tokenizer.vocabulary), **sizes))  # type: ignore[arg-type]


class Metric:
    def __init__(self) -> None:
        self.predictions, self.references = list[Any](), list[Any]()

    def add_batch(self, predictions: Tensor, references: Tensor) -> None:
        self.predictions += predictions.tolist()
        self.references += references.tolist()

    def compute(self) -> dict[str, float]:
        pairs = list(zip(self.predictions, self.references, strict=True))
        self.predictions, self.references = [], []
        return {"accuracy": sum(a == b for a, b in pairs) / len(pairs)}


class Accelerator:
    """Accelerate's on one CPU: what is plain."""

    device, mixed_precision, distributed_type = torch.device("cpu"), "no", "NO"

    def __init__(self, **options: Any) -> None:
        self.print = print

    def main_process_first(self) -> Any:
        return nullcontext()

    def prepare(self, *objects: Any) -> Any:
        return objects

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def gather_for_metrics(self, values: Any) -> Any:
        return values

    def end_training(self) -> None:
        pass


def set_seed(seed: int) -> None:
    import random

    import numpy as np

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def install(module: Callable[..., Any]) -> None:
    """Put the stand-ins of text's packages into ``sys.modules``."""
    module("torchtext")
    module("torchtext.data")
    module("torchtext.data.utils", get_tokenizer=lambda *names: str.split)
    module("torchtext.vocab", build_vocab_from_iterator=build_vocabulary)
    module("torchtext.datasets", Multi30k=translations)
    module("torchtext.datasets.multi30k", URL={})
    module("torchtext.legacy")
    module("torchtext.legacy.data", Field=Field, BucketIterator=SimpleNamespace(splits=split_batches))
    module("torchtext.legacy.datasets", SNLI=SimpleNamespace(splits=pairs_of_sentences))
    module("datasets", load_dataset=load_dataset)
    module("evaluate", load=lambda *names: Metric())
    import transformers.modeling_utils  # noqa: F401  (which imports the real one, where there is one)

    module("accelerate", Accelerator=Accelerator, DistributedType=SimpleNamespace(XLA="XLA"))
    module("accelerate.utils", set_seed=set_seed)


def install_transformers() -> None:
    """Have transformers build a small classifier with a tokenizer of its own, in place of loading both."""
    import transformers

    transformers.AutoTokenizer = SimpleNamespace(from_pretrained=lambda name: Tokenizer())  # type: ignore[misc]
    transformers.AutoModelForSequenceClassification = SimpleNamespace(from_pretrained=load_classifier)  # type: ignore[misc]
