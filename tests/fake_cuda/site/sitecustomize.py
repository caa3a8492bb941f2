"""Python starts here where this folder is on its path: it gets the fake device before torch is imported."""

import contextlib
import ctypes
import os


def install() -> None:
    """Load the device, and answer what torch's Python part asks of a build with CUDA."""
    device = ctypes.CDLL(os.environ["FAKE_CUDA"], mode=ctypes.RTLD_GLOBAL)
    import torch

    cuda = torch.cuda
    cuda._lazy_init = lambda: None
    cuda.is_available = lambda: device.fake_cuda_count() > 0
    cuda.device_count = lambda: device.fake_cuda_count()
    cuda.current_device = lambda: torch.accelerator.current_device_index()
    cuda.synchronize = lambda device=None: torch.accelerator.synchronize(device)
    cuda.get_device_name = lambda device=None: "host memory"
    cuda.get_device_properties = lambda device=None: None
    cuda.get_rng_state = lambda device="cuda": torch.zeros(16, dtype=torch.uint8)
    cuda.set_rng_state = lambda state, device="cuda": None
    cuda.manual_seed_all = cuda.manual_seed = lambda seed: None
    for name in ("reset_peak_memory_stats", "empty_cache"):
        setattr(torch.accelerator, name, lambda *_: None)
    for name in ("max_memory_allocated", "memory_allocated", "max_memory_reserved", "memory_reserved"):
        setattr(torch.accelerator, name, lambda *_: 0)
    cuda.is_bf16_supported = lambda *_, **__: True


# A process that hides its devices has none, as with a real one.
if os.environ.get("CUDA_VISIBLE_DEVICES") != "" and "FAKE_CUDA" in os.environ:
    with contextlib.suppress(ImportError):  # a Python without torch, such as a tool's own
        install()
