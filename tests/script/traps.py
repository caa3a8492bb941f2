"""What scripts do that a recording could get wrong: each works exactly, or is refused in a sentence.

Each trap is a loop that returns the numbers that it would print. Its docstring is the row of the table in the guide to
scripts; its outcome is "" where it prints the plain loop's numbers, else what the refusal says.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.script.loops import Prepare, samples, sums_of


class Trap(NamedTuple):
    """A loop, and what becomes of it under a plan."""

    loop: Callable[[Prepare], list[float]]
    refusal: str = ""


def build() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(samples(), batch_size=12)


def branch_on_loss(prepare: Prepare) -> list[float]:
    """a branch on the loss (`if loss > 1.0: ...`)"""
    model, optimizer, loader = prepare(*build())
    numbers = list[float]()
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaled = loss * 0.5 if loss > 1.0 else loss * 2
        scaled.backward()
        optimizer.step()
        numbers += [float(torch.isnan(loss)), loss.item()]
    return numbers + sums_of(model)


def metric_on_outputs(prepare: Prepare) -> list[float]:
    """a metric on the output of a training step (`topk`, a mask, `numpy()`)"""
    model, optimizer, loader = prepare(*build())
    numbers = list[float]()
    for x, y in loader:
        optimizer.zero_grad()
        output = model(x)
        loss = F.cross_entropy(output, y)
        loss.backward()
        optimizer.step()
        best = output.topk(2).indices
        numbers += [best.eq(y[:, None]).sum().item(), float(output.detach().numpy().max()), output[y == 1].sum().item()]
        numbers += [float(np.asarray(output.detach()).mean()), float((output.argmax(1) == y).float().mean())]
    return numbers


def edit_output(prepare: Prepare) -> list[float]:
    """an edit of the output in place (`output[:, 0] = 0`, `output += 1`)"""
    model, optimizer, loader = prepare(*build())
    numbers = list[float]()
    for x, y in loader:
        optimizer.zero_grad()
        output = model(x).clone()
        output[:, 0] = 0
        output += 1
        output.mul_(2)
        loss = F.cross_entropy(output, y)
        loss.backward()
        optimizer.step()
        numbers.append(loss.item())
    return numbers + sums_of(model)


def edit_view(prepare: Prepare) -> list[float]:
    """an edit in place of a view of the output (`part = output[0]; part.zero_()`)"""
    model, optimizer, loader = prepare(*build())
    for x, y in loader:
        output = model(x).clone()
        part = output[0]
        part.zero_()
        F.cross_entropy(output, y).backward()
        optimizer.step()
    return sums_of(model)


def edit_detached(prepare: Prepare) -> list[float]:
    """an edit in place of the output's memory (`output.data.mul_(2)`, `output.detach().zero_()`)"""
    model, optimizer, loader = prepare(*build())
    for x, y in loader:
        output = model(x)
        apart = output.clone().detach().mul_(3)  # which is another memory
        loss = F.cross_entropy(output, y) + (output * apart).mean()
        output.detach().mul_(2)
        loss.backward()
        optimizer.step()
    return sums_of(model)


def teacher(prepare: Prepare) -> list[float]:
    """a second, frozen model that `prepare` was not given"""
    model, optimizer, loader = build()
    outside = copy.deepcopy(model).requires_grad_(False)
    model, optimizer, loader = prepare(model, optimizer, loader)
    numbers = list[float]()
    for x, y in loader:
        optimizer.zero_grad()
        with torch.no_grad():
            target = outside(x)
        loss = F.mse_loss(model(x), target) + F.cross_entropy(outside(model(x).repeat(1, 2)[:, :4]), y)
        loss.backward()
        optimizer.step()
        numbers.append(loss.item())
    return numbers + sums_of(model)


def trained_outside(prepare: Prepare) -> list[float]:
    """a second, trained model that `prepare` was not given"""
    model, optimizer, loader = build()
    outside = copy.deepcopy(model)
    model, optimizer, loader = prepare(model, optimizer, loader)
    for x, y in loader:
        F.cross_entropy(model(x) + outside(x), y).backward()
        optimizer.step()
    return sums_of(model)


def numpy_in_loss(prepare: Prepare) -> list[float]:
    """numbers of numpy in the loss, some of them computed from the output"""
    model, optimizer, loader = prepare(*build())
    numbers = list[float]()
    for x, y in loader:
        optimizer.zero_grad()
        output = model(x)
        weight = np.float64(0.5)
        confidence = float(np.max(output.detach().numpy()))
        loss = F.cross_entropy(output, y) * weight + 0.01 * confidence * output.mean()
        loss.backward()
        optimizer.step()
        numbers.append(loss.item())
    return numbers + sums_of(model)


def ask_before_backward(prepare: Prepare) -> list[float]:
    """`loss.item()` before `backward()`"""
    model, optimizer, loader = prepare(*build())
    numbers = list[float]()
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        numbers.append(loss.item())
        loss.backward()
        optimizer.step()
    return numbers + sums_of(model)


def closed_over(prepare: Prepare) -> list[float]:
    """a tensor that the loss closes over, and that the loop changes between steps"""
    model, optimizer, loader = prepare(*build())
    weights, numbers = torch.ones(3).double(), list[float]()
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y, weight=weights)
        loss.backward()
        optimizer.step()
        weights[0] += 0.5
        weights = weights * 1.1
        numbers.append(loss.item())
    return numbers + sums_of(model)


def edit_batch(prepare: Prepare) -> list[float]:
    """a batch that is written in place between its use and `backward()`"""
    model, optimizer, loader = prepare(*build())
    numbers = list[float]()
    for x, y in loader:
        target = F.one_hot(y, 3).double()
        loss = (model(x) - target).pow(2).mean()
        target.mul_(2)
        loss = loss + (model(x) - target).abs().mean()
        target.zero_()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        numbers.append(loss.item())
    return numbers + sums_of(model)


def edit_batch_at_last(prepare: Prepare) -> list[float]:
    """the same, from a later batch than the first on"""
    model, optimizer, loader = prepare(*build())
    for number, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y)
        if number == 1:
            y.fill_(0)
        loss.backward()
        optimizer.step()
    return sums_of(model)


def edit_label_later(prepare: Prepare) -> list[float]:
    """labels that are written in place for each of two losses (`label.fill_(0)`)"""
    model, optimizer, loader = prepare(*build())
    label, numbers = torch.zeros(12, dtype=torch.long), list[float]()
    for x, _ in loader:
        optimizer.zero_grad()
        label.fill_(1)
        real = F.cross_entropy(model(x), label)
        real.backward()
        label.fill_(2)
        fake = F.cross_entropy(model(x + 1), label)
        fake.backward()
        optimizer.step()
        numbers.append((real + fake).item())
    return numbers + sums_of(model)


def keep_losses(prepare: Prepare) -> list[float]:
    """a list that keeps all losses, summed after the epoch"""
    model, optimizer, loader = prepare(*build())
    losses, outputs, total = list[Tensor](), list[Tensor](), torch.zeros(()).double()
    for x, y in loader:
        optimizer.zero_grad()
        output = model(x)
        loss = F.cross_entropy(output, y)
        loss.backward()
        optimizer.step()
        losses.append(loss)
        outputs.append(output.detach())
        total += loss.detach()
    sums: Any = sum(losses)
    return [sums.item(), torch.stack(losses).mean().item(), torch.cat(outputs).norm().item(), total.item()]


def hook_on_output(prepare: Prepare) -> list[float]:
    """a hook on the output's gradient (`output.register_hook(...)`)"""
    model, optimizer, loader = prepare(*build())
    for x, y in loader:
        output = model(x)
        output.register_hook(lambda gradient: gradient * 0)
        F.cross_entropy(output, y).backward()
        optimizer.step()
    return sums_of(model)


def gradient_of_output(prepare: Prepare) -> list[float]:
    """the gradient of an output after the step (`output.retain_grad()`)"""
    model, optimizer, loader = prepare(*build())
    for x, y in loader:
        output = model(x)
        output.retain_grad()
        F.cross_entropy(output, y).backward()
        optimizer.step()
    return sums_of(model)


def functional_gradient(prepare: Prepare) -> list[float]:
    """a gradient taken in the loss (`torch.autograd.grad(output.sum(), output)`)"""
    model, optimizer, loader = prepare(*build())
    for x, y in loader:
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), output)
        (F.cross_entropy(output, y) + slope.mean()).backward()
        optimizer.step()
    return sums_of(model)


def backward_twice(prepare: Prepare) -> list[float]:
    """two losses of one output, `retain_graph=True` for the first"""
    model, optimizer, loader = prepare(*build())
    numbers = list[float]()
    for x, y in loader:
        optimizer.zero_grad()
        output = model(x)
        entropy, size = F.cross_entropy(output, y), output.pow(2).mean()
        entropy.backward(retain_graph=True)
        size.backward()
        optimizer.step()
        numbers += [entropy.item(), size.item()]
    return numbers + sums_of(model)


def backward_of_released(prepare: Prepare) -> list[float]:
    """`backward()` twice on one loss"""
    model, _, loader = prepare(*build())
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        loss.backward()
    return sums_of(model)


def scaled_gradients(prepare: Prepare) -> list[float]:
    """`torch.amp.GradScaler`, with `unscale_` and clipping"""
    model, optimizer, loader = build()
    model, numbers = model.float(), list[float]()
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model, optimizer, loader = prepare(model, optimizer, loader)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.float()), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        numbers.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        scaler.step(optimizer)
        scaler.update()
        numbers += [loss.item(), scaler.get_scale()]
    return numbers + sums_of(model)


def casts(prepare: Prepare) -> list[float]:
    """`torch.autocast` around the model and the loss"""
    model, optimizer, loader = build()
    model, optimizer, loader = prepare(model.float(), optimizer, loader)
    numbers = list[float]()
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x.float())
            loss = F.cross_entropy(output, y)
        loss.backward()
        optimizer.step()
        numbers += [loss.item(), float(output.dtype == torch.bfloat16)]
    return numbers + sums_of(model)


def stop_early(prepare: Prepare) -> list[float]:
    """`break` on a number, and the rest of the epoch unused"""
    model, optimizer, loader = prepare(*build())
    numbers = list[float]()
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            if loss.item() < 1.05:
                break
            loss.backward()
            optimizer.step()
            numbers.append(loss.item())
    return numbers + sums_of(model)


def without_no_grad(prepare: Prepare) -> list[float]:
    """an evaluation without `no_grad`"""
    model, optimizer, loader = prepare(*build())
    numbers = list[float]()
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        model.eval()
        numbers.append(F.cross_entropy(model(x), y).item())
        model.train()
    return numbers + sums_of(model)


def call_old_output(prepare: Prepare) -> list[float]:
    """a loss of an output that the model computed before an optimizer step"""
    model, optimizer, loader = prepare(*build())
    x, y = next(iter(loader))
    output = model(x)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    F.cross_entropy(output, y).backward()
    optimizer.step()
    return sums_of(model)


def write_before_backward(prepare: Prepare) -> list[float]:
    """a weight that is written between the model's call and `backward()`"""
    model, optimizer, loader = prepare(*build())
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        with torch.no_grad():
            model[0].weight.mul_(0.5)
        loss.backward()
        optimizer.step()
    return sums_of(model)


def ask_after_step(prepare: Prepare) -> list[float]:
    """an output and a norm of weights, computed before an optimizer step and printed after it"""
    model, optimizer, loader = prepare(*build())
    numbers = list[float]()
    for x, y in loader:
        old_output, norm = model(x + 1), model[0].weight.norm()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        numbers += [old_output.sum().item(), norm.item()]
    return numbers + sums_of(model)


def sum_up(prepare: Prepare) -> list[float]:
    """a running sum of losses over many steps, read at the end"""
    model, optimizer, loader = prepare(*build())
    total, largest = 0, torch.zeros(()).double()
    for _ in range(25):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total = total + loss.detach()
            largest = torch.maximum(largest, loss.detach())
    return [*torch.stack([torch.as_tensor(total), largest]).tolist(), *sums_of(model)]


def infer(prepare: Prepare) -> list[float]:
    """an evaluation in `torch.inference_mode()`, before the first step and between steps"""
    model, optimizer, loader = prepare(*build())
    numbers = list[float]()
    for x, y in loader:
        with torch.inference_mode():
            numbers += [F.cross_entropy(model(x), y).item(), model(torch.ones(3, 4).double()).argmax(1).sum().item()]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return numbers + sums_of(model)


def draw_twice(prepare: Prepare) -> list[float]:
    """two losses of one output with a dropout before it, each with its own `backward()`"""
    model, optimizer, loader = build()
    model.append(nn.Dropout(0.5))
    model, optimizer, loader = prepare(model, optimizer, loader)
    for x, y in loader:
        output = model(x)
        F.cross_entropy(output, y).backward(retain_graph=True)
        output.pow(2).mean().backward()
        optimizer.step()
    return sums_of(model)


def freeze_later(prepare: Prepare) -> list[float]:
    """parameters that are frozen in mid-training, and thawed"""
    model, optimizer, loader = prepare(*build())
    numbers = list[float]()
    for number, (x, y) in enumerate(loader):
        for parameter in model[0].parameters():
            parameter.requires_grad_(number != 1)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        numbers.append(loss.item())
    return numbers + sums_of(model)


def draw_per_step(prepare: Prepare) -> list[float]:
    """random numbers that the loop draws, of torch, numpy and Python"""
    model, optimizer, loader = prepare(*build())
    random.seed(1)
    np.random.seed(2)
    numbers = list[float]()
    for x, y in loader:
        optimizer.zero_grad()
        output = model(x)
        noise = torch.randn_like(output)
        numbers.append(output.std().item() + noise.sum().item())
        noisy = x + 0.1 * torch.randn_like(x) * random.random() + float(np.random.rand())
        loss = F.cross_entropy(model(noisy) + 0.1 * noise, y)
        loss.backward()
        optimizer.step()
        numbers += [loss.item(), torch.rand(1).item(), random.random(), float(np.random.rand())]
    return numbers + sums_of(model)


TRAPS = {
    trap.loop.__name__: trap
    for trap in (
        Trap(branch_on_loss),
        Trap(metric_on_outputs),
        Trap(edit_output),
        Trap(edit_view, "is a view, or of which there are views"),
        Trap(edit_detached, "is a view, or of which there are views"),
        Trap(teacher),
        Trap(trained_outside, "requires a gradient meets what the model returns"),
        Trap(numpy_in_loss),
        Trap(ask_before_backward),
        Trap(closed_over),
        Trap(edit_batch),
        Trap(edit_batch_at_last, "was written in place after it was used"),
        Trap(edit_label_later),
        Trap(keep_losses),
        Trap(hook_on_output, "a hook on what the model returns would not be called"),
        Trap(gradient_of_output, "the gradient of what the model returns is not kept"),
        Trap(functional_gradient),
        Trap(backward_twice),
        Trap(backward_of_released, "backward() was called before on this loss"),
        Trap(scaled_gradients),
        Trap(casts),
        Trap(stop_early),
        Trap(without_no_grad),
        Trap(call_old_output, "is asked for after its optimizer's step()"),
        Trap(write_before_backward, "or a write of its weights"),
        Trap(ask_after_step),
        Trap(sum_up),
        Trap(infer),
        Trap(draw_twice, "draws random numbers (a dropout), and would draw others"),
        Trap(freeze_later),
        Trap(draw_per_step),
    )
}
