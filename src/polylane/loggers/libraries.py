"""Loggers of other libraries, each imported when a run asks for it; and what ``--log`` names."""

from __future__ import annotations

import importlib
import secrets
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from polylane.errors import PolylaneError, describe_error
from polylane.loggers.logger import Logger, RunFacts


class TensorBoardLogger:
    """Writes event files below ``tensorboard`` in the run's folder: ``tensorboard --logdir run`` shows all runs."""

    def __init__(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._open = SummaryWriter
        self._writer: Any = None
        self._hook_before = threading.excepthook

    def begin(self, run: RunFacts) -> None:
        """Open an event file; of a resumed run, steps after the checkpoint are shown once."""
        # Its thread that writes passes what it raises on to the next call, which is a sentence then.
        self._hook_before, threading.excepthook = threading.excepthook, self._pass_over_own_thread
        purge = None if run.resumed_at is None else run.resumed_at + 1
        self._writer = self._open(str(run.folder / "tensorboard"), purge_step=purge)
        self._writer.add_text("plan", run.plan, run.resumed_at or 0)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write numbers."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def end(self) -> None:
        """Write what is left, and close the file."""
        self._writer.close()
        threading.excepthook = self._hook_before

    def _pass_over_own_thread(self, failed: Any) -> None:
        if type(failed.thread).__module__.partition(".")[0] != "tensorboard":
            self._hook_before(failed)


class WandbLogger:
    """Sends to Weights & Biases, or below ``wandb`` in the run's folder where ``WANDB_MODE`` is "offline"."""

    def __init__(self) -> None:
        import wandb

        self._wandb: Any = wandb
        self._run: Any = None

    def begin(self, run: RunFacts) -> None:
        """Open a run, or the same one again where it is resumed."""
        identity = keep_identity(run, "wandb", lambda: secrets.token_hex(8))
        self._run = self._wandb.init(
            id=identity,
            name=run.name,
            dir=str(run.folder),
            resume="allow",
            config={"plan": run.plan, "workers": run.workers, **run.options},
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Send numbers."""
        self._run.log(dict(values), step=step)

    def end(self) -> None:
        """Send what is left, and close the run."""
        self._run.finish()


class MlflowLogger:
    """Sends to MLflow's tracking server or folder, as ``MLFLOW_TRACKING_URI`` names it, or where MLflow defaults to."""

    def __init__(self) -> None:
        import mlflow

        self._mlflow: Any = mlflow
        try:
            mlflow.MlflowClient()  # opens the place, so that one which cannot be is refused before the run begins
        except Exception as error:
            raise PolylaneError(
                f"MLflow cannot open {mlflow.get_tracking_uri()} ({type(error).__name__}): set MLFLOW_TRACKING_URI to "
                "the address of a tracking server; or pip install mlflow, for a database of this machine; or set "
                "MLFLOW_TRACKING_URI=file:mlruns and MLFLOW_ALLOW_FILE_STORE=true, for a folder"
            ) from None

    def begin(self, run: RunFacts) -> None:
        """Open a run, or the same one again where it is resumed."""
        identity = keep_identity(run, "mlflow", lambda: str(self._mlflow.start_run(run_name=run.name).info.run_id))
        if self._mlflow.active_run() is None:
            self._mlflow.start_run(run_id=identity)
        self._mlflow.set_tags({"plan": run.plan, "workers": run.workers, **run.options})

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Send numbers."""
        self._mlflow.log_metrics(dict(values), step=step)

    def end(self) -> None:
        """Close the run."""
        self._mlflow.end_run()


LIBRARIES: dict[str, Callable[[], Logger]] = {
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
    "mlflow": MlflowLogger,
}


def keep_identity(run: RunFacts, library: str, create: Callable[[], str]) -> str:
    """Return the id by which a library knows a run: a resumed run keeps the one that its folder has.

    Args:
        run: what begins, or goes on, in its folder.
        library: name of the library.
        create: returns the id of a new run, which it may begin for that.
    """
    file = run.folder / f".{library}-id"
    if run.resumed_at is not None and file.exists():
        return file.read_text(encoding="utf-8").strip()
    identity = create()
    file.write_text(identity + "\n", encoding="utf-8")
    return identity


def open_loggers(text: str) -> dict[str, Logger]:
    """Return the loggers that ``--log`` names, before a run begins.

    Args:
        text: names separated by commas: of a library, or of a class of the user's own as ``module:Class``.

    Raises:
        PolylaneError: a name is not known, or a library is not installed.
    """
    return {name: _open_logger(name) for name in dict.fromkeys(filter(None, map(str.strip, text.split(","))))}


def _open_logger(name: str) -> Logger:
    module, colon, attribute = name.partition(":")
    if not colon and name not in LIBRARIES:
        names = ", ".join(LIBRARIES)
        raise PolylaneError(f"--log {name}: known are {names}; a class of your own is module:Class")
    try:
        return LIBRARIES[name]() if not colon else _find_class(module, attribute)()
    except ImportError as error:
        package = {"mlflow": "mlflow-skinny"}.get(name, name)
        hint = f": pip install {package}" if not colon else ""
        raise PolylaneError(f"--log {name}: {describe_error(error)}{hint}") from None
    except PolylaneError as error:
        raise PolylaneError(f"--log {name}: {error}") from None
    except Exception as error:
        raise PolylaneError(f"--log {name}: {describe_error(error)}") from None


def _find_class(module: str, attribute: str) -> Any:
    if (folder := str(Path.cwd())) not in sys.path:  # as `python -m` does; an installed command does not
        sys.path.insert(0, folder)
    return getattr(importlib.import_module(module), attribute)
