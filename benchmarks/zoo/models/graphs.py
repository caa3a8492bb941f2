"""Graph networks: on one graph, whose samples are its nodes, and on batches of molecules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.entry import CLASSES, SAMPLES, Family, numbers

GRAPHS = Family("graphs", "Graph networks: nodes of one graph, batches of molecules")
NODES, EDGES, FEATURES = 23, 61, 8


def from_geometric(name: str, *sizes: int, **how: Any) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        from torch_geometric.nn import models

        made: nn.Module = getattr(models, name)(*sizes, **how)
        return made

    return model


# One graph ------------------------------------------------------------------------------------------------------------


def one_graph(steps: int) -> Sequence[Any]:
    """The same graph in every step, torch_geometric's Data with a mask of the nodes that are trained on."""
    from torch_geometric.data import Data

    draw = numbers(0)
    graph = Data(
        x=torch.randn(NODES, FEATURES, generator=draw),
        edge_index=torch.randint(0, NODES, (2, EDGES), generator=draw),
        y=torch.randint(0, CLASSES, (NODES,), generator=draw),
        train_mask=torch.rand(NODES, generator=draw) < 0.6,
    )
    return [graph] * steps


def classify_nodes(model: Any, data: Any) -> Tensor:
    out = model(data.x, data.edge_index)
    return F.cross_entropy(out[data.train_mask], data.y[data.train_mask])


def pna() -> nn.Module:
    from torch_geometric.nn.models import PNA
    from torch_geometric.utils import degree

    degrees = degree(one_graph(1)[0].edge_index[1], NODES, dtype=torch.long)
    made: nn.Module = PNA(
        FEATURES,
        16,
        2,
        CLASSES,
        aggregators=["mean", "min", "max", "std"],
        scalers=["identity", "amplification", "attenuation"],
        deg=torch.bincount(degrees),
    )
    return made


GRAPHS.add("GCN", "torch-geometric", from_geometric("GCN", FEATURES, 16, 2, CLASSES), classify_nodes, one_graph)
GRAPHS.add(
    "GraphSAGE", "torch-geometric", from_geometric("GraphSAGE", FEATURES, 16, 2, CLASSES), classify_nodes, one_graph
)
GRAPHS.add(
    "GAT",
    "torch-geometric",
    from_geometric("GAT", FEATURES, 16, 2, CLASSES, heads=2, dropout=0.2),
    classify_nodes,
    one_graph,
)
GRAPHS.add("PNA", "torch-geometric", pna, classify_nodes, one_graph)
GRAPHS.add(
    "SGFormer",
    "torch-geometric",
    from_geometric("SGFormer", FEATURES, 16, CLASSES, gnn_num_layers=2),
    lambda model, data: F.nll_loss(
        model(data.x, data.edge_index, torch.zeros_like(data.y))[data.train_mask], data.y[data.train_mask]
    ),
    one_graph,
)


# Molecules ------------------------------------------------------------------------------------------------------------


def molecules(steps: int) -> Sequence[Any]:
    """Batches of molecules as torch_geometric's DataLoader makes them: one graph of several parts that do not touch."""
    from torch_geometric.data import Batch, Data

    def molecule(draw: torch.Generator) -> Any:
        atoms = int(torch.randint(3, 7, (1,), generator=draw))
        return Data(
            x=torch.randn(atoms, FEATURES, generator=draw),
            edge_index=torch.randint(0, atoms, (2, 3 * atoms), generator=draw),
            edge_attr=torch.randn(3 * atoms, 4, generator=draw),
            y=torch.randn(1, 1, generator=draw),
        )

    return [Batch.from_data_list([molecule(draw) for _ in range(SAMPLES)]) for draw in map(numbers, range(steps))]


class GraphIsomorphism(nn.Module):
    """The network of torch_geometric's mutag_gin example: GIN, a pool over each graph, a perceptron."""

    def __init__(self) -> None:
        from torch_geometric.nn import GIN, MLP

        super().__init__()
        self.gnn = GIN(FEATURES, 16, 2, dropout=0.1, jk="cat")
        self.classifier = MLP([16, 16, 1], norm="batch_norm", dropout=0.1)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, batch_size: int) -> Tensor:
        from torch_geometric.nn import global_add_pool

        x = self.gnn(x, edge_index)
        x = global_add_pool(x, batch, size=batch_size)
        pooled: Tensor = self.classifier(x)
        return pooled


class GraphGPS(nn.Module):
    """The network of torch_geometric's graph_gps example: GPS layers of attention and GINE, a pool, a perceptron."""

    def __init__(self) -> None:
        from torch_geometric.nn import GINEConv, GPSConv

        super().__init__()
        self.node_emb = nn.Linear(FEATURES, 16)
        self.edge_emb = nn.Linear(4, 16)
        self.convs = nn.ModuleList()
        for _ in range(2):
            layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
            self.convs.append(GPSConv(16, GINEConv(layers), heads=2))
        self.mlp = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor) -> Tensor:
        from torch_geometric.nn import global_add_pool

        x, edge_attr = self.node_emb(x), self.edge_emb(edge_attr)
        for conv in self.convs:
            x = conv(x, edge_index, batch, edge_attr=edge_attr)
        predicted: Tensor = self.mlp(global_add_pool(x, batch))
        return predicted


GRAPHS.add(
    "GIN (molecules)",
    "torch-geometric",
    GraphIsomorphism,
    lambda model, data: F.mse_loss(model(data.x, data.edge_index, data.batch, data.num_graphs), data.y),
    molecules,
)
GRAPHS.add(
    "AttentiveFP (molecules)",
    "torch-geometric",
    from_geometric("AttentiveFP", FEATURES, 16, 1, edge_dim=4, num_layers=2, num_timesteps=2, dropout=0.1),
    lambda model, data: F.mse_loss(model(data.x, data.edge_index, data.edge_attr, data.batch), data.y),
    molecules,
)
GRAPHS.add(
    "GraphGPS (molecules)",
    "torch-geometric",
    GraphGPS,
    lambda model, data: F.mse_loss(model(data.x, data.edge_index, data.edge_attr, data.batch), data.y),
    molecules,
)
