"""Training and testing of segmentors and detectors through mmengine's runner, as a command line says."""

import argparse
import ast
import difflib
import json
import os
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from mmengine.config import Config, DictAction
from mmengine.logging import print_log
from mmengine.model import BaseModel
from mmengine.registry import MODELS, DefaultScope
from mmengine.runner import Runner
from mmengine.structures import InstanceData, PixelData
from PIL import Image
from torch.utils.data import DataLoader

from wbmm.data.loader import end_with_parent
from wbmm.deploy.runtime import EXPORTED
from wbmm.handler import is_out_of_memory
from wbmm.io.atomic import write_text
from wbmm.machine import PRECISIONS, describe_precision, machine_facts, set_precision

from .check_data import check_detection_data, check_segmentation_data, follow_ignore_index
from .exported import ExportedDetector, ExportedSegmentor
from .loading import check_channels, check_fits, check_load_from, prepare_resume, use_safe_reader
from .networks import READ_KEYS, build_mm_model, load_mm_config, prepare_device, settings_explained
from .register import MosaicHook

__all__ = [
    "MMRunner",
    "add_test_arguments",
    "add_train_arguments",
    "check_keys",
    "multi_scale_pipeline",
    "run_testing",
    "run_training",
    "set_data_root",
    "track",
    "use_amp",
]

PIPELINES = {"train_pipeline", "val_pipeline", "test_pipeline"}  # usual variables, which look like tta_pipeline
LAUNCHERS = ("none", "pytorch", "slurm", "mpi")
SCOPES = {"seg": "mmseg", "det": "mmdet"}
TTA_RATIOS = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75)  # the paper's, where the configuration names none
_CHECKPOINT = "of a runner, released, fused by `wbmm reparam`, or a file of `wbmm export`"
LOADING = "transforms/loading.py"  # of mmcv, mmseg and mmdet
MOSAIC = "test_mosaic.png"  # in the work folder
TRACKERS = {"tensorboard": "TensorboardVisBackend", "wandb": "WandbVisBackend"}


class OptionAction(DictAction):
    """KEY=VALUE as mmengine reads it, but for texts with spaces, of which mmengine drops the spaces.

    A value with spaces that is no list is a text, and lists of quoted texts are read as Python reads them.
    """

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        options = dict(getattr(namespace, self.dest, None) or {})
        for entry in values:
            key, equals, value = entry.partition("=")
            if not equals:
                parser.error(f"{option_string} {entry}: write KEY=VALUE")
            options[key] = self._text_with_spaces(value) or self._parse_iterable(value)
        setattr(namespace, self.dest, options)

    @staticmethod
    def _text_with_spaces(value: str) -> object:
        """None for a value that mmengine reads as well."""
        if " " not in value.strip():
            return None
        if value[0] not in "([\"'":
            return None if "," in value else value
        try:
            return ast.literal_eval(value)
        except (ValueError, SyntaxError):
            return None


class MMRunner(Runner):
    """mmengine's runner, whose data workers end with it."""

    @staticmethod
    def build_dataloader(*args, **kwargs) -> DataLoader:
        loader = Runner.build_dataloader(*args, **kwargs)
        loader.worker_init_fn = partial(_start_worker, loader.worker_init_fn)
        return loader


def _start_worker(mmengines: Callable[[int], None] | None, worker: int) -> None:
    end_with_parent()
    if mmengines is not None:
        mmengines(worker)


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    _add_common_arguments(parser)
    parser.add_argument(
        "--resume", nargs="?", const="auto", metavar="FILE", help="continue the run in the work folder, or from FILE"
    )
    parser.add_argument("--check-all", action="store_true", help="read every image before training, not a sample")
    parser.add_argument("--amp", action="store_true", help="mixed precision; needs a GPU")
    parser.add_argument("--track", nargs="+", choices=TRACKERS, default=[], help="log there as well")


def add_test_arguments(parser: argparse.ArgumentParser, extra: str) -> None:
    _add_common_arguments(parser)
    parser.add_argument("checkpoint", help=_CHECKPOINT)
    if extra == "seg":
        help_tta = "multi-scale testing with flips, at tta_ratios of the test pipeline's scale"
        parser.add_argument("--tta", action="store_true", help=help_tta)
    parser.add_argument(
        "--fuse", nargs="?", const="compact", choices=("compact", "dense"), help="fuse the backbone after loading"
    )
    parser.add_argument("--show-dir", help="draw predictions into this folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the metrics, with what they are of")


def _add_common_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="a file, a name such as coco/..., or for a segmentor a row (table:windows/hier)")
    parser.add_argument("--work-dir", help="output folder; work_dirs/NAME OF THE CONFIGURATION when not given")
    parser.add_argument("--data-root", help="where the data are, in place of what the configuration says")
    parser.add_argument(
        "--cfg-options", nargs="+", action=OptionAction, metavar="KEY=VALUE", help="changes of the configuration"
    )
    parser.add_argument("--precision", choices=PRECISIONS, default="tf32", help="of float32 products (default: tf32)")
    parser.add_argument("--launcher", choices=LAUNCHERS, help="how processes were started; found out for torchrun")


def run_training(extra: str, args: argparse.Namespace) -> Runner:
    """Trains as the command line says; returns the runner."""
    use_safe_reader()
    cfg = _configure(args, extra)
    with settings_explained(cfg):
        return _train(cfg, extra, args)


def _train(cfg: Config, extra: str, args: argparse.Namespace) -> Runner:
    texts = [_check_schedule(cfg), prepare_resume(cfg, args.resume), _precision_line(args.precision)]
    if cfg.get("load_from") and not cfg.resume:
        check_load_from(cfg.load_from)
    if args.amp:
        use_amp(cfg)
    track(cfg, args.track)
    texts += [_PREPARE[extra](cfg, args.check_all), prepare_device(cfg)]
    runner = MMRunner.from_cfg(cfg)
    model = getattr(runner.model, "module", runner.model)
    check_channels(model)
    if cfg.get("load_from"):
        check_fits(model, cfg.load_from, cfg.resume)
    for text in filter(None, texts):
        print_log(text, logger="current")
    try:
        runner.train()
    except Exception as error:
        if is_out_of_memory(error):
            raise ValueError(_too_large(cfg)) from error
        if LOADING in f"{error} {''.join(traceback.format_tb(error.__traceback__))}":  # the text has a worker's
            raise ValueError(
                "an image or annotation cannot be loaded: --check-all reads all of them before training, and names it"
            ) from error
        raise
    return runner


def _check_schedule(cfg: Config) -> str | None:
    """Raises for a part of the schedule that ends before it begins, as a warm-up longer than training makes it.

    A warm-up of one step is left out, and said so: mmengine would never leave its first rate.
    """
    schedule = cfg.get("param_scheduler") or []
    schedule = schedule if isinstance(schedule, list) else [schedule]
    for step in schedule:
        begin, end = step.get("begin", 0), step.get("end")
        if end is not None and end <= begin:
            raise ValueError(
                f"{step.type} of param_scheduler begins at {begin} and ends at {end}: make training longer, or the "
                "warm-up before it shorter"
            )
    kept = [step for step in schedule if not _lasts_one_step(step)]
    if len(kept) == len(schedule):
        return None
    cfg.param_scheduler = kept
    return "a warm-up of one step is left out: with it, mmengine would stay at its first learning rate"


def _lasts_one_step(step: dict) -> bool:
    last = step.get("end") is not None and step.end - step.get("begin", 0) == 1
    return step.type == "LinearLR" and last and not step.get("convert_to_iter_based")


def _too_large(cfg: Config) -> str:
    """What to lower when memory ran out."""
    checkpointing = "" if cfg.model.backbone.get("with_cp") else ", or set model.backbone.with_cp=True"
    return (
        f"the memory is too small for batches of {cfg.train_dataloader.batch_size} images: lower "
        f"train_dataloader.batch_size, or the scale and crop size of the pipelines{checkpointing}"
    )


def run_testing(extra: str, args: argparse.Namespace) -> dict:
    """Tests as the command line says; returns the metrics."""
    cfg = _configure(args, extra)
    with settings_explained(cfg):
        return _score(cfg, extra, args)


def _score(cfg: Config, extra: str, args: argparse.Namespace) -> dict:
    cfg.load_from, cfg.resume = None, False
    if args.json is not None:  # which is written at the end of a long test
        args.json.parent.mkdir(parents=True, exist_ok=True)
    if args.show_dir:
        cfg.default_hooks.visualization.update(draw=True)
        cfg.visualizer.save_dir = args.show_dir
    if extra == "seg":
        follow_ignore_index(cfg)
        check_segmentation_data(cfg, ["test"])
    else:
        print_log(check_detection_data(cfg, ["test"]), logger="current")
    prepare_device(cfg)
    mosaic = {"type": MosaicHook.__name__, "file": str(Path(cfg.work_dir) / MOSAIC)}
    cfg.custom_hooks = [*cfg.get("custom_hooks", []), mosaic]
    print_log(_precision_line(args.precision), logger="current")
    tta = getattr(args, "tta", False)
    if Path(args.checkpoint).suffix in EXPORTED:
        model, form = _open_exported(cfg, extra, args), "exported"
    else:
        model = build_mm_model(cfg, SCOPES[extra], args.checkpoint, args.fuse)
        form = getattr(model.backbone, "form", args.fuse or "training")
    if tta:
        cfg.test_dataloader.dataset.pipeline, scales = multi_scale_pipeline(cfg)
        print_log(f"multi-scale testing with flips at {scales}", logger="current")
        with DefaultScope.overwrite_default_scope(SCOPES[extra]):
            model = MODELS.build({**cfg.get("tta_model", {"type": "SegTTAModel"}), "module": model})
    names = ("test_dataloader", "test_cfg", "test_evaluator", "default_hooks", "custom_hooks", "env_cfg")
    names += ("log_processor", "visualizer", "default_scope", "randomness", "launcher", "work_dir")
    runner = MMRunner(model=model, cfg=cfg, **{name: cfg[name] for name in names if cfg.get(name) is not None})
    metrics = runner.test()
    how = "multi-scale with flips" if tta else "single scale"
    figures = ", ".join(f"{key} {value:.4g}" for key, value in metrics.items())
    print_log(f"{args.checkpoint}, {form} form, {how}: {figures}", logger="current")
    if args.json is not None and runner.rank == 0:
        images = len(runner.test_dataloader.dataset)
        said = {"checkpoint": args.checkpoint, "form": form, "how": how, "images": images, "facts": machine_facts()}
        numbers = {key: float(value) for key, value in metrics.items()}  # some are numpy's
        write_text(args.json, json.dumps({"metrics": numbers, **said}, indent=1) + "\n")
    return metrics


def _open_exported(cfg: Config, extra: str, args: argparse.Namespace) -> "ExportedModel":
    """A file of `wbmm export` to be tested; it resizes by itself, so the test pipeline no longer does."""
    for given, what in (
        (getattr(args, "tta", False), "--tta"),
        (args.fuse, "--fuse"),
        (cfg.launcher != "none", "several processes"),
    ):
        if given:
            raise ValueError(f"{args.checkpoint}: {what} needs a checkpoint, not an exported file")
    steps = cfg.test_dataloader.dataset.pipeline
    cfg.test_dataloader.dataset.pipeline = [step for step in steps if step["type"] != "Resize"]
    kind = ExportedSegmentor if extra == "seg" else ExportedDetector
    return ExportedModel(kind(args.checkpoint))


class ExportedModel(BaseModel):
    """An exported file as a model that mmengine's runner can test: whole pictures in, labels or objects out."""

    def __init__(self, exported: ExportedSegmentor | ExportedDetector) -> None:
        super().__init__()
        self.exported = exported

    def test_step(self, data: dict) -> list:
        for image, sample in zip(data["inputs"], data["data_samples"], strict=True):
            picture = Image.fromarray(np.ascontiguousarray(image.permute(1, 2, 0).numpy()[..., ::-1]))
            if isinstance(self.exported, ExportedSegmentor):
                labels = torch.from_numpy(self.exported.labels(picture))
                sample.set_data({"pred_sem_seg": PixelData(data=labels[None])})
                continue
            boxes, labels, scores, masks = self.exported.find(picture)
            found = {"bboxes": boxes, "labels": labels, "scores": scores, **({} if masks is None else {"masks": masks})}
            sample.set_data({"pred_instances": InstanceData(**{k: torch.from_numpy(v) for k, v in found.items()})})
        return data["data_samples"]

    def forward(self, *_, **__):
        raise NotImplementedError("an exported file can be tested, and no more")


def _configure(args: argparse.Namespace, extra: str) -> Config:
    """The configuration with the command line's changes, its work folder and its launcher; sets the precision."""
    set_precision(args.precision)
    cfg = load_mm_config(args.config, args.cfg_options, {"seg": "segmentation", "det": "detection"}[extra])
    check_keys(cfg)
    if args.data_root is not None:
        set_data_root(cfg, args.data_root)
    if args.work_dir is not None:
        cfg.work_dir = args.work_dir
    elif cfg.get("work_dir") is None:
        cfg.work_dir = str(Path("work_dirs") / Path(args.config).stem)
    file = Path(cfg.filename or "")
    if file.resolve().parent == Path(cfg.work_dir).resolve():  # mmengine would write the whole of it over the file
        object.__setattr__(cfg, "_filename", str(file.with_name(f"{file.stem}_whole.py")))
    torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    cfg.launcher = args.launcher or ("pytorch" if torchrun else "none")
    return cfg


def _precision_line(precision: str) -> str:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return f"precision: {precision} ({describe_precision(precision, device)})"


def check_keys(cfg: Config) -> None:
    """Raises on a top-level key that is nearly one of mmengine's; any other name may be a variable of the file."""
    for key in cfg:
        if key.rstrip("_0123456789") in READ_KEYS | PIPELINES:
            continue
        near = difflib.get_close_matches(key, READ_KEYS, n=1, cutoff=0.88)
        if near:
            raise ValueError(f"{cfg.filename}: unknown key {key!r}; did you mean {near[0]!r}?")


def set_data_root(cfg: Config, root: str) -> None:
    """Moves every data set of a configuration, and the annotation files that its metrics read, to another folder."""
    for part in ("train", "val", "test"):
        dataset = (cfg.get(f"{part}_dataloader") or {}).get("dataset")
        while dataset is not None and "data_root" not in dataset:
            dataset = dataset.get("dataset")  # of a wrapper
        if dataset is None:
            continue
        old, dataset.data_root = dataset.data_root, root
        evaluator = cfg.get(f"{part}_evaluator")
        for metric in evaluator if isinstance(evaluator, list) else [evaluator or {}]:
            if metric.get("ann_file") and Path(metric.ann_file).is_relative_to(old):
                metric.ann_file = str(Path(root) / Path(metric.ann_file).relative_to(old))


def use_amp(cfg: Config) -> None:
    """Mixed precision, with dynamic loss scaling; `optim_wrapper.dtype=bfloat16` for the other kind."""
    if not torch.cuda.is_available():
        raise ValueError("--amp needs a CUDA device, and torch sees none here")
    if cfg.optim_wrapper.type not in ("OptimWrapper", "AmpOptimWrapper"):
        raise ValueError(f"--amp cannot change optim_wrapper.type={cfg.optim_wrapper.type!r}; expected 'OptimWrapper'")
    cfg.optim_wrapper.type = "AmpOptimWrapper"
    cfg.optim_wrapper.setdefault("loss_scale", "dynamic")


def track(cfg: Config, names: Sequence[str]) -> None:
    """Adds logging back ends to those of the configuration."""
    backends = cfg.visualizer.vis_backends
    have = {backend["type"] for backend in backends}
    cfg.visualizer.vis_backends = [*backends, *({"type": TRACKERS[n]} for n in names if TRACKERS[n] not in have)]


def _prepare_segmentation(cfg: Config, everything: bool) -> str | None:
    """Has labels watched in training, and in the first process looks at the data before."""
    ignored = follow_ignore_index(cfg)
    hook = {"type": "LabelRangeHook", "num_classes": cfg.model.decode_head.num_classes, "ignore_index": ignored}
    cfg.custom_hooks = [*cfg.get("custom_hooks", []), hook]
    return check_segmentation_data(cfg, everything=everything) if _is_first_process() else None


def _prepare_detection(cfg: Config, everything: bool) -> str | None:
    """In the first process, looks at the data before training."""
    return check_detection_data(cfg, everything=everything) if _is_first_process() else None


def _is_first_process() -> bool:
    return int(os.environ.get("RANK", 0)) == 0


def multi_scale_pipeline(cfg: Config) -> tuple[list[dict], str]:
    """The pipeline of `--tta`, and which scales it has: `tta_pipeline` if there is one, or by `tta_ratios`.

    Each ratio is to the scale of the test pipeline (to the image's own size, where that does not resize), with and
    without a flip.
    """
    if "tta_pipeline" in cfg:
        return cfg.tta_pipeline, "the scales of tta_pipeline"
    steps = cfg.test_dataloader.dataset.pipeline
    places = [place for place, step in enumerate(steps) if step.type == "Resize"]
    if len(places) > 1:
        raise ValueError("--tta: the test pipeline resizes twice; give tta_pipeline in the configuration")
    place = places[0] if places else 1  # after the image is loaded
    resize = dict(steps[place]) if places else {"type": "Resize", "scale_factor": 1.0, "keep_ratio": True}
    resizes = [_scaled(resize, ratio) for ratio in cfg.get("tta_ratios", TTA_RATIOS)]
    flips = [{"type": "RandomFlip", "prob": p, "direction": "horizontal"} for p in (0.0, 1.0)]
    rest = [[step] for step in steps[place + len(places) :]]
    scales = ", ".join(str(step.get("scale") or f"x{step['scale_factor']:g}") for step in resizes)
    return [*steps[:place], {"type": "TestTimeAug", "transforms": [resizes, flips, *rest]}], scales


def _scaled(resize: dict, ratio: float) -> dict:
    if resize.get("scale") is not None:
        sides = resize["scale"] if isinstance(resize["scale"], list | tuple) else [resize["scale"]] * 2
        return {**resize, "scale": tuple(int(side * ratio) for side in sides)}
    factor = resize["scale_factor"]
    return {**resize, "scale_factor": tuple(f * ratio for f in factor) if isinstance(factor, tuple) else factor * ratio}


_PREPARE: dict[str, Callable[[Config, bool], str | None]] = {"seg": _prepare_segmentation, "det": _prepare_detection}
