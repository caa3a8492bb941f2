"""Recommendation and tables: embedding bags, factorization machines, tabular transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.entry import CLASSES, SAMPLES, Family, numbers

RECOMMENDERS = Family("recommenders", "Recommendation and tables: embedding bags, tabular networks")
FIELDS, NUMBERS, CATEGORIES = 4, 3, 20


def tables(steps: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Batches of rows of a table: categories [samples, FIELDS], numbers [samples, NUMBERS], labels of 0 or 1."""

    def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
        draw = numbers(step)
        return (
            torch.randint(0, CATEGORIES, (SAMPLES, FIELDS), generator=draw),
            torch.randn(SAMPLES, NUMBERS, generator=draw),
            torch.randint(0, 2, (SAMPLES,), generator=draw).float(),
        )

    return [batch(step) for step in range(steps)]


# Bags of embeddings ---------------------------------------------------------------------------------------------------


class TextClassificationModel(nn.Module):
    """The model of torch's tutorial of text classification: texts one after the other, and where each begins."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(64, 16, sparse=sparse)
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, text: Tensor, offsets: Tensor) -> Tensor:
        embedded = self.embedding(text, offsets)
        scores: Tensor = self.fc(embedded)
        return scores


def texts(steps: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Batches of (labels, all tokens of all texts, where each text begins), as the tutorial's collate_batch makes."""

    def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
        draw = numbers(step)
        lengths = torch.randint(2, 9, (SAMPLES,), generator=draw)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths[:-1]]).cumsum(dim=0)
        tokens = torch.randint(0, 64, (int(lengths.sum()),), generator=draw)
        return torch.randint(0, CLASSES, (SAMPLES,), generator=draw), tokens, offsets

    return [batch(step) for step in range(steps)]


def classify_texts(model: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    label, text, offsets = batch
    return F.cross_entropy(model(text, offsets), label)


RECOMMENDERS.add("EmbeddingBag", "torch's tutorials", TextClassificationModel, classify_texts, texts)
RECOMMENDERS.add(
    "EmbeddingBag (sparse)",
    "torch's tutorials",
    lambda: TextClassificationModel(sparse=True),
    classify_texts,
    texts,
    lambda parameters: torch.optim.SGD(list(parameters), lr=5.0),
)


class NeuralFactorization(nn.Module):
    """Neural collaborative filtering as its users write it: sparse embeddings of users and items, and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(CATEGORIES, 8, sparse=True)
        self.items = nn.Embedding(CATEGORIES, 8, sparse=True)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return (self.users(users) * self.items(items)).sum(-1)


RECOMMENDERS.add(
    "Matrix factorization (SparseAdam)",
    "torch's tutorials",
    NeuralFactorization,
    lambda model, batch: F.binary_cross_entropy_with_logits(model(batch[0][:, 0], batch[0][:, 1]), batch[2]),
    tables,
    lambda parameters: torch.optim.SparseAdam([parameter for _, parameter in parameters], lr=0.01),
)


# Click-through rates --------------------------------------------------------------------------------------------------


def from_deepctr(name: str, **how: Any) -> Callable[[], nn.Module]:
    """A model of deepctr-torch: its columns of categories and of numbers come in one tensor."""

    def model() -> nn.Module:
        from deepctr_torch import models
        from deepctr_torch.inputs import DenseFeat, SparseFeat

        columns: list[Any] = [SparseFeat(f"c{i}", CATEGORIES, embedding_dim=4) for i in range(FIELDS)]
        columns += [DenseFeat(f"n{i}", 1) for i in range(NUMBERS)]
        made: nn.Module = getattr(models, name)(columns, columns, dnn_hidden_units=(16, 16), **how)
        return made

    return model


def click(model: Any, batch: Sequence[Tensor]) -> Tensor:
    """As deepctr-torch's own fit does: binary cross-entropy, and the model's own regularization."""
    predicted = model(torch.cat([batch[0].float(), batch[1]], dim=-1)).squeeze()
    loss = F.binary_cross_entropy(predicted, batch[2].squeeze())
    total: Tensor = (loss + model.get_regularization_loss() + model.aux_loss).sum()
    return total


RECOMMENDERS.add("DeepFM", "deepctr-torch", from_deepctr("DeepFM"), click, tables)
RECOMMENDERS.add("DCN", "deepctr-torch", from_deepctr("DCN"), click, tables)
RECOMMENDERS.add("AutoInt", "deepctr-torch", from_deepctr("AutoInt", att_layer_num=2), click, tables)


# Tables ---------------------------------------------------------------------------------------------------------------


def tabnet() -> nn.Module:
    from pytorch_tabnet.tab_network import TabNet

    model: nn.Module = TabNet(
        FIELDS + NUMBERS,
        2,
        n_d=4,
        n_a=4,
        n_steps=2,
        cat_idxs=list(range(FIELDS)),
        cat_dims=[CATEGORIES] * FIELDS,
        cat_emb_dim=[2] * FIELDS,
        group_attention_matrix=torch.eye(FIELDS + NUMBERS),
    )
    return model


def attend_sparsely(model: Any, batch: Sequence[Tensor]) -> Tensor:
    """As pytorch-tabnet's own training does: cross-entropy, and the sparsity of the masks."""
    scores, sparsity = model(torch.cat([batch[0].float(), batch[1]], dim=-1))
    return F.cross_entropy(scores, batch[2].long()) - 1e-3 * sparsity


def ft_transformer() -> nn.Module:
    from rtdl_revisiting_models import FTTransformer

    model: nn.Module = FTTransformer(
        n_cont_features=NUMBERS,
        cat_cardinalities=[CATEGORIES] * FIELDS,
        d_out=1,
        n_blocks=2,
        d_block=16,
        attention_n_heads=4,
        attention_dropout=0.2,
        ffn_d_hidden_multiplier=4 / 3,
        ffn_dropout=0.1,
        residual_dropout=0.0,
    )
    return model


def tab_transformer() -> nn.Module:
    from tab_transformer_pytorch import TabTransformer

    model: nn.Module = TabTransformer(
        categories=(CATEGORIES,) * FIELDS,
        num_continuous=NUMBERS,
        dim=16,
        depth=2,
        heads=2,
        dim_head=8,
        mlp_act=nn.ReLU(),
    )
    return model


RECOMMENDERS.add("TabNet", "pytorch-tabnet", tabnet, attend_sparsely, tables)
RECOMMENDERS.add(
    "FT-Transformer",
    "rtdl_revisiting_models",
    ft_transformer,
    lambda model, batch: F.binary_cross_entropy_with_logits(model(batch[1], batch[0]).squeeze(-1), batch[2]),
    tables,
)
RECOMMENDERS.add(
    "TabTransformer",
    "tab-transformer-pytorch",
    tab_transformer,
    lambda model, batch: F.binary_cross_entropy_with_logits(model(batch[0], batch[1]).squeeze(-1), batch[2]),
    tables,
)
