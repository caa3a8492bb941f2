"""Recipes with something wrong in one or two of their functions."""

from __future__ import annotations

import random

WHOLE = {
    "head": "import torch\nfrom torch import nn\n",
    "model": "def model(width=8):\n    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))\n",
    "loss": "def loss(model, batch):\n    return nn.functional.cross_entropy(model(batch[0]), batch[1])\n",
    "optimizer": "def optimizer(parameters, lr=0.1):\n    return torch.optim.SGD(parameters, lr=lr)\n",
    "data": "def data(split, samples=12):\n    return [(torch.ones(4) * i, i % 2) for i in range(samples)]\n",
    "scheduler": "def scheduler(optimizer):\n    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)\n",
    "collate": "",
}

RESULTS = (
    "None",
    "3",
    "'text'",
    "[]",
    "{}",
    "object()",
    "lambda *a: None",
    "torch.ones(3)",
    "torch.tensor(float('nan'))",
    "torch.ones(())",
    "nn.Linear",
    "nn.Linear(4, 2)",
    "nn.Identity()",
    "nn.Module()",
    "iter([])",
    "iter([1])",
    "range(3)",
    "(i for i in range(3))",
    "[None] * 3",
    "[(torch.ones(i), 0) for i in range(5)]",
    "[{'x': torch.ones(4), 1: 'a'}] * 4",
    "b'bytes'",
    "float('inf')",
    "type('Odd', (), {'__len__': lambda s: -1, '__getitem__': lambda s, i: i})()",
    "type('Odd', (), {'__len__': lambda s: 10**18, '__getitem__': lambda s, i: (torch.ones(4), 0)})()",
    "type('Odd', (), {'__len__': lambda s: 5, '__getitem__': lambda s, i: 1 / 0})()",
    "type('Odd', (), {'__iter__': lambda s: 1 / 0})()",
    "type('Odd', (), {'__getattr__': lambda s, n: s})()",
)
RAISES = (
    "raise ValueError",
    "raise ValueError('a\\x1b[31mb\\nc' + 'x' * 5000)",
    "raise KeyError(3)",
    "raise type('Odd', (Exception,), {'__str__': lambda s: 1 / 0})()",
    "raise StopIteration",
    "raise MemoryError",
    "raise RecursionError",
    "raise AssertionError",
    "raise SystemExit",
    "raise SystemExit(3)",
    "__import__('sys').exit('a word')",
    "raise NotImplementedError('no')",
    "raise OSError(28, 'No space left on device')",
    "raise UnicodeDecodeError('utf-8', b'a', 0, 1, 'odd')",
    "return undefined",
    "assert False",
    "1 / 0",
    "return (lambda f: f(f))(lambda f: f(f))",
)
MODELS = (
    "nn.Sequential()",
    "nn.ModuleList([nn.Linear(4, 2)])",
    "nn.Sequential(nn.Linear(4, 2).requires_grad_(False))",
    "nn.Sequential(nn.Linear(4, 2, device='meta'))",
    "nn.Linear(3, 2)",
    "nn.Linear(4, 0)",
    "nn.Linear(4, 2).double()",
    "nn.Linear(4, 2).half()",
    "nn.LazyLinear(2)",
    "nn.Embedding(4, 2, sparse=True)",
    "nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))",
    "nn.Sequential(nn.Linear(4, 2), nn.Dropout(1.0))",
    "nn.utils.parametrizations.weight_norm(nn.Linear(4, 2))",
    "(m := nn.Sequential(), m.add_module('[/b]:smile:\\x1b[31m', nn.Linear(4, 2)), m)[2]",
    "(m := nn.Sequential(), m.add_module('n' * 5000, nn.Linear(4, 2)), m)[2]",
    "(m := nn.Sequential(), m.add_module('a b', nn.Linear(4, 2)), m)[2]",
    "(m := nn.Linear(4, 2), m.register_forward_hook(lambda *a: 1 / 0), m)[2]",
    "(m := nn.Linear(4, 2), m.register_buffer('b', torch.tensor(float('nan'))), m)[2]",
    "(m := nn.Linear(4, 2), m.weight.data.fill_(float('nan')), m)[2]",
    "(m := nn.Linear(4, 2), m.register_parameter('p', None), m)[2]",
    "(m := nn.Linear(4, 2), setattr(m, 'forward', 3), m)[2]",
    "type('M', (nn.Module,), {})()",
    "type('M', (nn.Module,), {'forward': lambda s, x: x})()",
    "type('M', (nn.Module,), {'forward': lambda s: 1, '__init__': lambda s: None})()",
    "type('M', (nn.Module,), {'__init__': lambda s: None})()",
    "torch.jit.script(nn.Linear(4, 2))",
    "torch.compile(nn.Linear(4, 2))",
)
LOSSES = (
    "model(batch[0])",
    "model(batch[0]).sum().item()",
    "model(batch[0]).argmax(1).float().mean()",
    "model(batch[0]).sum().detach()",
    "model(batch).mean()",
    "model(batch[0], batch[1]).mean()",
    "model(batch[0]).mean() * float('nan')",
    "model(batch[0]).mean().to(torch.complex64)",
    "(model(batch[0]).mean(), 1)",
    "{'loss': model(batch[0]).mean()}",
    "model(batch[0])[7].mean()",
    "model(batch[0]).view(3, 3).mean()",
    "model(batch[0]).mean().long()",
    "batch[0].mean()",
    "model(batch[0]).mean().cuda()",
    "model(batch[0]).numpy().mean()",
    "eval(input())",
    "model.missing(batch[0])",
    "setattr(model, 'extra', nn.Linear(2, 2)) or model(batch[0]).mean()",
    "model.zero_grad() or model(batch[0]).mean()",
    "__import__('polylane').Mean(model(batch[0]).sum(), 0)",
    "__import__('polylane').Mean(1, 2)",
    "__import__('polylane').Mean(model(batch[0]), torch.ones(3))",
)
OPTIMIZERS = (
    "torch.optim.SGD([], lr=1)",
    "torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1)",
    "torch.optim.SGD(parameters, lr=-1)",
    "torch.optim.SparseAdam(parameters)",
    "torch.optim.LBFGS(parameters)",
    "torch.optim.Adam([p for _, p in parameters][:1])",
    "torch.optim.Adam",
    "torch.optim.lr_scheduler.ExponentialLR(torch.optim.SGD(parameters, lr=1), 0.9)",
    "torch.optim.SGD(list(parameters) * 2, lr=1)",
)
HEADS = (
    "import missing_module_\n",
    "raise KeyboardInterrupt_\n",
    "def (\n",
    "\x00",
    "# -*- coding: odd -*-\n",
    "import torch\n\tfrom torch import nn\n",
    "model = 3\n",
    "raise ValueError('\\x1b[31m' * 999)\n",
    "from tiny import *\n",
    "1 / 0\n",
)


def broken_recipe(draw: random.Random) -> str:
    """Return the text of a recipe of which one or two functions do what they should not."""
    parts = dict(WHOLE)
    for _ in range(draw.choice((1, 1, 1, 2))):
        name = draw.choice(("model", "model", "loss", "loss", "optimizer", "data", "scheduler", "collate", "head"))
        if name == "head":
            parts["head"] += draw.choice(HEADS)
            continue
        of_it = {"model": MODELS, "loss": LOSSES, "optimizer": OPTIMIZERS}.get(name, RESULTS)
        known = {"model": "", "loss": "model, batch", "optimizer": "parameters", "data": "split"}
        arguments = known.get(name, {"scheduler": "optimizer", "collate": "samples"}.get(name, ""))
        body = draw.choice((f"return {draw.choice(of_it)}", f"return {draw.choice(RESULTS)}", draw.choice(RAISES)))
        kind = draw.random()
        if kind < 0.03:
            parts[name] = ""
        elif kind < 0.06:
            parts[name] = f"{name} = {draw.choice(RESULTS)}\n"
        elif kind < 0.1:
            parts[name] = f"def {name}({draw.choice(('', 'a, b, c, d', '*a', '**k', 'a=1, /', '*, a'))}):\n    {body}\n"
        else:
            parts[name] = f"def {name}({arguments}):\n    {body}\n"
    return "".join(parts.values())
