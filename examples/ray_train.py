"""Train under a plan in the workers of Ray Train, which replaces a worker that dies.

python examples/ray_train.py                          two workers, data=2
python examples/ray_train.py --kill-at 37             kills one: the training goes on from its last checkpoint
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

EPOCHS, BATCH, SAVE_EVERY = 4, 64, 8


def train(config: dict[str, Any]) -> None:
    """What Ray runs in every worker: it has set the process group up, of which polylane makes use."""
    import ray.train

    import polylane

    torch.manual_seed(0)
    x = torch.randn(1024, 16)
    dataset = list(zip(x, x.sum(dim=1, keepdim=True), strict=True))
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    job = polylane.parallelize(
        model, nn.MSELoss(), optimizer, example=default_collate(dataset[:BATCH]), plan=config["plan"]
    )
    # A folder that all workers share: each writes its part of a checkpoint.
    storage = Path(config["storage"])
    if any(storage.glob("checkpoints/step-*")):
        job.load_checkpoint(storage / "checkpoints")
    for batch in job.batches(dataset, BATCH, epochs=EPOCHS, start=job.position):
        result = job.step(batch)
        if result.step % SAVE_EVERY == 0:
            job.save_checkpoint(storage / "checkpoints", keep=2)
            ray.train.report({"step": result.step, "loss": result.loss})
        if result.step == config["kill_at"] and job.world.rank == 1 and not (storage / "killed").exists():
            (storage / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    job.save(storage / "model.safetensors")
    job.close()


def main() -> None:
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    parser = argparse.ArgumentParser(description="Train under a plan in the workers of Ray Train.")
    parser.add_argument("--plan", default="data=2")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--storage", type=Path, default=Path("run/ray"), help="a folder that all nodes share")
    parser.add_argument("--kill-at", type=int, default=0, help="the step at which a worker is killed, once")
    options = parser.parse_args()
    storage = options.storage.resolve()
    storage.mkdir(parents=True, exist_ok=True)
    ray.init(include_dashboard=False)
    trainer = TorchTrainer(
        train,
        train_loop_config={"plan": options.plan, "storage": str(storage), "kill_at": options.kill_at},
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(storage_path=str(storage), failure_config=FailureConfig(max_failures=1)),
    )
    trainer.fit()
    print(f"{storage / 'model.safetensors'} is written")


if __name__ == "__main__":
    main()
