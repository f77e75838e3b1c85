"""TensorBoard and Weights & Biases behind one small interface: `log(step, values)` and `close(status)`."""

import secrets
import threading
from pathlib import Path

from .config import TrainConfig, to_dict, to_yaml
from .metrics import writing

__all__ = ["TensorBoard", "WeightsAndBiases"]


class TensorBoard:
    """Event files in `<run>/tensorboard`; a resumed run hides what the interrupted one wrote after its step."""

    def __init__(self, cfg: TrainConfig, out: Path, resumed_step: int | None):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "log.tensorboard=true needs tensorboard: pip install '.[train]', or log.tensorboard=false"
            ) from error
        purge = None if resumed_step is None else resumed_step + 1
        self.folder = out / "tensorboard"
        self._hook, threading.excepthook = threading.excepthook, self._thread_failed
        with writing(self.folder):
            self.writer = SummaryWriter(str(self.folder), purge_step=purge)
            if resumed_step is None:
                self.writer.add_text("config", f"```yaml\n{to_yaml(cfg)}```", 0)

    def log(self, step: int, values: dict[str, float]) -> None:
        with writing(self.folder):  # it writes in a thread of its own: this may be the error of a value before
            for name, value in values.items():
                self.writer.add_scalar(name, value, step)

    def close(self, status: str) -> None:
        try:
            with writing(self.folder):
                self.writer.close()
        finally:
            threading.excepthook = self._hook

    def _thread_failed(self, failure: threading.ExceptHookArgs) -> None:
        """Keeps the traceback of a full disk off the console: the same error comes out of the next call."""
        ours = type(failure.thread).__module__.startswith("tensorboard.")
        if not (ours and issubclass(failure.exc_type, OSError)):
            self._hook(failure)


class WeightsAndBiases:
    """One wandb run for the life of the folder: its id is kept in `wandb-id.txt`, so resuming continues it.

    Steps are a logged value, not wandb's own counter, which refuses to go back to the step of a checkpoint.
    """

    def __init__(self, cfg: TrainConfig, out: Path, resumed_step: int | None):
        try:
            import wandb
        except ImportError as error:
            raise ImportError("log.wandb=true needs wandb: in the checkout, pip install '.[wandb]'") from error
        id_file = out / "wandb-id.txt"
        if resumed_step is None or not id_file.is_file():
            with writing(id_file):
                out.mkdir(parents=True, exist_ok=True)
                id_file.write_text(secrets.token_hex(4) + "\n")
        self.run = wandb.init(
            project=cfg.log.wandb_project,
            name=cfg.log.name or out.name,
            id=id_file.read_text().strip(),
            resume="allow",
            dir=str(out),
            config=to_dict(cfg),
        )
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, values: dict[str, float]) -> None:
        self.run.log({**values, "step": step})

    def close(self, status: str) -> None:
        self.run.summary["status"] = status
        self.run.finish(exit_code=0 if status in ("finished", "stopped") else 1)
