"""torch.compile: what it made of the user's modules and functions is left out, and the originals run in its place.

A graph is captured from the original operators. A compiled function would start the compiler's own processes and
threads, which do not survive a fork, and would give parameters names of its own ("_orig_mod.").
"""

from __future__ import annotations

import sys
import types
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

_WRAPPER = "torch._dynamo.eval_frame"
_ORIGINAL = "_torchdynamo_orig_callable"
_REPLACED = "_polylane_replaced"


def compiler_off() -> AbstractContextManager[Any]:
    """Return a context manager: functions that torch.compile has made run their original."""
    # Before it is imported, which takes a second, nothing was compiled; and while it compiles it allows no change.
    if _WRAPPER not in sys.modules or torch.compiler.is_dynamo_compiling():
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def without_compiler(module: Any) -> Any:
    """Return what torch.compile was given, if this is what it returned; in all modules inside the same, in place.

    Parameters have the names then that they have without the compiler.
    """
    plain = _original_module(module)
    if isinstance(plain, nn.Module):
        replaced = [*([""] if plain is not module else []), *_use_originals(plain)]
        if replaced:
            vars(plain)[_REPLACED] = [*compiled_parts(plain), *replaced]
    return plain


def compiled_parts(module: Any) -> list[str]:
    """Return the paths of what was replaced in a module by :func:`without_compiler`; "" is the module itself."""
    return list(vars(module).get(_REPLACED, ())) if isinstance(module, nn.Module) else []


def _original_module(module: Any) -> Any:
    kind = getattr(sys.modules.get(_WRAPPER), "OptimizedModule", None)
    while kind is not None and isinstance(module, kind):
        module = module._orig_mod
    return module


def _use_originals(module: nn.Module) -> list[str]:
    names = []
    for path, submodule in list(module.named_modules()):
        if _original_module(submodule) is not submodule:
            continue
        path = path.replace("_orig_mod.", "")
        for name, child in submodule._modules.items():
            if (plain := _original_module(child)) is not child:
                submodule._modules[name] = plain
                names.append(f"{path}.{name}" if path else name)
        if getattr(submodule._compiled_call_impl, _ORIGINAL, None) is not None:  # by module.compile()
            submodule._compiled_call_impl = None
            names.append(path)
        for name, value in list(vars(submodule).items()):
            if isinstance(value, types.FunctionType) and (plain := getattr(value, _ORIGINAL, None)) is not None:
                vars(submodule)[name] = plain
                names.append(f"{path}.{name}" if path else name)
    return names


def describe_left_out(model: nn.Module, loss: Any, functions_run: Collection[types.CodeType] = ()) -> list[str]:
    """Return a note for the user that torch.compile is left out, if anything is compiled.

    Args:
        model, loss: the user's, as :func:`without_compiler` returned them.
        functions_run: code of the functions that ran in the loss, those of torch's own among them.
    """
    file = getattr(sys.modules.get(_WRAPPER), "__file__", "")
    has_compiled = any(code.co_name == "compile_wrapper" and code.co_filename == file for code in functions_run)
    names = [name or "the model" for name in compiled_parts(model)]
    names += [f"loss.{name}" if name else "loss" for name in compiled_parts(loss)]
    names = [*dict.fromkeys(names), *(["functions in forward or loss"] if has_compiled else [])]
    return [f"torch.compile is left out, and the original runs: {', '.join(names)}"] if names else []
