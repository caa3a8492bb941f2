"""The hand-written models of the tests: what is hard to capture, to cut, to split."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DenseNet(nn.Module):
    """Every layer reads all before it: values cross many stages."""

    def __init__(self, layers: int = 4, growth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, growth, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(growth * (i + 1)) for i in range(layers))
        self.convs = nn.ModuleList(nn.Conv2d(growth * (i + 1), growth, 3, padding=1) for i in range(layers))
        self.fc = nn.Linear(growth * (layers + 1), 10)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for norm, conv in zip(self.norms, self.convs, strict=True):
            features.append(conv(F.relu(norm(torch.cat(features, 1)))))
        return self.fc(torch.cat(features, 1).mean((2, 3)))


class Experts(nn.Module):
    """Each token goes to the one expert that its router prefers. The sizes depend on the data: not exportable."""

    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, 2 * hidden), nn.GELU(), nn.Linear(2 * hidden, hidden))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weight, choice = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            index = (choice == i).nonzero().squeeze(1)
            if index.numel() == 0:
                continue
            out = out.index_add(0, index, weight[index, None] * expert(flat[index]))
        return out.view_as(x)


class MoeBlock(nn.Module):
    def __init__(self, hidden: int, heads: int, experts: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.moe = Experts(hidden, experts)
        self.dropout = nn.Dropout(0.1)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(y))
        return x + self.moe(self.norm2(x))


class MoeGPT(nn.Module):
    def __init__(self, layers: int = 2, hidden: int = 16, vocab: int = 32) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, hidden), nn.Embedding(12, hidden)
        self.blocks = nn.ModuleList(MoeBlock(hidden, heads=4, experts=4) for _ in range(layers))
        self.head = nn.Linear(hidden, vocab, bias=False)
        self.head.weight = self.token.weight

    def forward(self, text: Tensor) -> Tensor:
        x = self.token(text) + self.position(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Sign(torch.autograd.Function):
    """Straight-through: forward is the sign, backward pretends it was the identity within [-1, 1], and doubles it.

    The true derivative is zero everywhere: a capture that drops this backward shows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * gradients[0] * (x.abs() <= 1).to(x.dtype)


class Binarized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2, self.fc3 = (
            nn.Linear(16, 32),
            nn.LayerNorm(32),
            nn.Linear(32, 32),
            nn.Linear(32, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = Sign.apply(self.norm(self.fc1(x)))
        x = Sign.apply(self.fc2(x))
        return self.fc3(x)


class Encoder(nn.Module):
    """torch's own transformer layer, dropout inside its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(32, 16)
        layers = [nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True) for _ in range(2)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(16, 32)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.layers(self.token(text)))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(32, 16)
        self.lstm = nn.LSTM(16, 16, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(16, 32)

    def forward(self, text: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.token(text))
        return self.head(hidden)


class InPlace(nn.Module):
    """Writes in place, alone and through views: never to be cut between the view and the write."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.conv1(x))
        shifted = x.new_zeros(x.shape)
        shifted[:, :, 1:] = x[:, :, :-1]
        shifted[:, :, :1].copy_(x[:, :, -1:])
        x = self.conv2(shifted)
        x += shifted
        return self.fc(self.relu(x).mean((2, 3)))


class Nested(nn.Module):
    """Its batch is a dictionary that holds tuples, and so is its output."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.both = nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(16, 8)
        self.head = nn.Linear(24, 4)

    def forward(self, pair: tuple[Tensor, tuple[Tensor, Tensor]], scale: Tensor) -> dict[str, Any]:
        left, (right, both) = pair
        hidden = torch.cat([self.left(left), self.right(right), self.both(both)], 1).tanh()
        return {"logits": self.head(hidden * scale[:, None]), "hidden": (hidden, scale)}


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        self.document = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, query: Tensor, document: Tensor) -> Tensor:
        return F.normalize(self.query(query)) @ F.normalize(self.document(document)).T


class Routed(nn.Module):
    """Each token goes to the two experts that its router prefers; every expert sees every token, most at weight zero.

    No size depends on the data. The experts' weights lie in one tensor each.
    """

    def __init__(self, hidden: int, experts: int, wide: int, top: int = 2) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, hidden, wide) / hidden**0.5)
        self.gate = nn.Parameter(torch.randn(experts, hidden, wide) / hidden**0.5)
        self.down = nn.Parameter(torch.randn(experts, wide, hidden) / wide**0.5)
        self.bias = nn.Parameter(torch.zeros(experts, 1, hidden))
        self.experts, self.top = experts, top

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.flatten(0, 1)
        chances = self.router(flat).softmax(-1)
        best, choice = chances.topk(self.top, -1)
        weight = torch.zeros_like(chances).scatter(1, choice, best / best.sum(-1, keepdim=True))
        hidden = F.silu(torch.einsum("td,edf->etf", flat, self.gate)) * torch.einsum("td,edf->etf", flat, self.up)
        out = torch.baddbmm(self.bias, hidden, self.down)
        # So that the router spreads its tokens (Switch Transformers, section 2.2), sample by sample.
        chosen = F.one_hot(choice, self.experts).sum(1).to(x.dtype).unflatten(0, x.shape[:2]).mean(1)
        spread = self.experts * (chosen * chances.unflatten(0, x.shape[:2]).mean(1)).sum(-1).mean()
        return torch.einsum("etd,te->td", out, weight).view_as(x), spread


class RoutedGPT(nn.Module):
    def __init__(self, layers: int = 2, hidden: int = 16, vocab: int = 32) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, hidden)
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(layers))
        self.mixers = nn.ModuleList(nn.Conv1d(hidden, hidden, 3, padding=2, groups=4) for _ in range(layers))
        self.experts = nn.ModuleList(Routed(hidden, experts=5, wide=12) for _ in range(layers))
        self.head = nn.Linear(hidden, vocab)

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:
        x, spread = self.token(text), torch.zeros((), device=text.device)
        for norm, mixer, experts in zip(self.norms, self.mixers, self.experts, strict=True):
            x = x + mixer(x.transpose(1, 2))[..., :-2].transpose(1, 2)  # of this token and the two before it
            out, more = experts(norm(x))
            x, spread = x + out, spread + more
        return self.head(x), spread


class Separable(nn.Module):
    """Depthwise and pointwise convolutions, squeeze and excitation, group normalization, no two stages of one width."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList(self._block(*sizes) for sizes in ((6, 12, 2, 1), (12, 18, 3, 2), (18, 24, 6, 1)))
        self.shrink, self.grow = nn.Conv2d(24, 5, 1), nn.Conv2d(5, 24, 1)
        self.mixed = nn.Conv2d(24, 16, 3, padding=2, dilation=2, groups=8, padding_mode="circular")
        self.fc = nn.Linear(16, 10)

    @staticmethod
    def _block(inside: int, outside: int, groups: int, stride: int) -> nn.Module:
        depthwise = nn.Conv2d(inside, inside, 3, stride, padding=1, groups=inside)
        multiplied = nn.Conv2d(inside, 2 * inside, 3, padding="same", groups=inside, bias=False)
        pointwise = nn.Conv2d(2 * inside, outside, 1)
        return nn.Sequential(depthwise, nn.GroupNorm(groups, inside), nn.SiLU(), multiplied, pointwise, nn.Hardswish())

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        x = x * self.grow(F.relu(self.shrink(F.adaptive_avg_pool2d(x, 1)))).sigmoid()
        return self.fc(F.adaptive_max_pool2d(self.mixed(x), (2, 1)).flatten(2).mean(-1))


class Latents(nn.Module):
    """Attention by hand: a few latents read a padded text, then torch's own module, whose keys have another width."""

    def __init__(self, hidden: int = 18, heads: int = 3, latents: int = 5) -> None:
        super().__init__()
        self.token = nn.Embedding(32, 10, padding_idx=0)
        self.latents = nn.Parameter(torch.randn(latents, hidden))
        self.query, self.keys_values = nn.Linear(hidden, hidden), nn.Linear(10, 2 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden)
        self.sharpness = nn.Parameter(torch.ones(heads, 1, 1))
        self.second = nn.MultiheadAttention(hidden, heads, kdim=10, vdim=10, add_bias_kv=False)
        self.head = nn.Linear(hidden, 4)
        self.heads = heads

    def forward(self, text: Tensor) -> Tensor:
        words, padding = self.token(text), text == 0
        q = self.query(self.latents).unflatten(-1, (self.heads, -1))
        k, v = self.keys_values(words).unflatten(-1, (2, self.heads, -1)).unbind(2)
        scores = torch.einsum("lhd,bthd->bhlt", q, k) * self.sharpness
        scores = scores.masked_fill(padding[:, None, None], float("-inf"))
        x = self.latents + self.out(torch.einsum("bhlt,bthd->blhd", scores.softmax(-1), v).flatten(2))
        words = words.transpose(0, 1)
        y, seen = self.second(x.transpose(0, 1), words, words, key_padding_mask=padding)
        return self.head((x + y.transpose(0, 1)).mean(1)) + seen.amax((1, 2))[:, None]


class Branching(nn.Module):
    """The root forward itself asks what it computed which way to go: no graph of it exists."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.fc1(x))
        if hidden.sum() > 0:  # of what is not negative: a part of a batch must go the way of the whole
            hidden = F.relu(self.fc2(hidden))
        return self.fc3(hidden)


class SkippingLayers(nn.Module):
    """Six layers in a row; the last reads the first one's output as well."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        first = h = torch.tanh(self.layers[0](x))
        for layer in self.layers[1:-1]:
            h = torch.tanh(layer(h))
        return self.layers[-1](h + first)


class ParallelLayers(SkippingLayers):
    """Layers side by side but for two that read an earlier one; the loss reads all."""

    def forward(self, x: Tensor) -> Tensor:
        made = [torch.tanh(layer(x)) for layer in self.layers[:4]]
        made.append(torch.sin(self.layers[4](made[3])))
        return self.layers[5](made[0]) + made[1] + made[2] + made[4]
