"""Small data in COCO's format: overlapping discs, squares and triangles, crowds, tiny objects, images with none."""

import json
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw
from pycocotools import mask as rle

CATEGORIES = {"disc": 3, "square": 7, "triangle": 90}  # ids with gaps, as COCO's
COLOURS = {"disc": (210, 60, 50), "square": (60, 110, 210), "triangle": (70, 180, 80)}
SIZES = [(128, 128), (97, 131), (150, 120)]  # height and width: square, landscape, portrait
EMPTY_EVERY, CROWD_EVERY = 8, 5  # images without objects, images with a crowd
POINTS = 32  # of a disc's polygon


def outline(kind: str, x: float, y: float, side: float) -> list[tuple[float, float]]:
    if kind == "square":
        return [(x, y), (x + side, y), (x + side, y + side), (x, y + side)]
    if kind == "triangle":
        return [(x, y + side), (x + side, y + side), (x + side / 2, y)]
    angles = np.linspace(0, 2 * np.pi, POINTS, endpoint=False)
    return [(x + side / 2 * (1 + np.cos(a)), y + side / 2 * (1 + np.sin(a))) for a in angles]


def draw(rng: np.random.Generator, height: int, width: int, crowd: bool, empty: bool):
    """An image `[H, W, 3]` and its objects: kind, mask `[H, W]`, polygon, and whether it is a crowd."""
    image = np.zeros((height, width, 3)) + rng.uniform(90, 160)
    objects = []
    sides = [] if empty else [*rng.uniform(0.22, 0.45, rng.integers(1, 4)), *[0.07] * (rng.random() < 0.25)]
    for share in sides:
        side = max(6.0, min(height, width) * share)
        x, y = rng.uniform(0, width - side), rng.uniform(0, height - side)
        kind = str(rng.choice(list(CATEGORIES)))
        points = outline(kind, x, y, side)
        canvas = Image.new("L", (width, height))
        ImageDraw.Draw(canvas).polygon(points, fill=1)
        mask = np.array(canvas).astype(bool)
        image[mask] = np.array(COLOURS[kind]) + rng.normal(0, 12, 3)
        for other in objects:  # what lies in front hides what lies behind
            other["mask"] &= ~mask
        objects.append({"kind": kind, "mask": mask, "crowd": False, "points": points})
    if crowd and objects:  # a heap of small discs, one annotation
        mask = np.zeros((height, width), dtype=bool)
        for _ in range(6):
            x, y = rng.uniform(0, width / 3), rng.uniform(0, height / 3)
            canvas = Image.new("L", (width, height))
            ImageDraw.Draw(canvas).ellipse((x, y, x + 9, y + 9), fill=1)
            mask |= np.array(canvas).astype(bool)
        image[mask] = COLOURS["disc"]
        for other in objects:
            other["mask"] &= ~mask
        objects.append({"kind": "disc", "mask": mask, "crowd": True})
    image += rng.normal(0, 8, image.shape)
    return image.clip(0, 255).astype(np.uint8), [found for found in objects if found["mask"].sum() >= 12]


def annotation(found: dict, number: int, image_id: int) -> dict:
    """An object whose outline is whole as a polygon, others and crowds as run lengths."""
    mask = np.asfortranarray(found["mask"].astype(np.uint8))
    code = rle.encode(mask)
    entry = {
        "id": number,
        "image_id": image_id,
        "category_id": CATEGORIES[found["kind"]],
        "bbox": [float(value) for value in rle.toBbox(code)],
        "area": float(rle.area(code)),
        "iscrowd": int(found["crowd"]),
    }
    drawn = Image.new("L", mask.shape[::-1])
    if "points" in found:
        ImageDraw.Draw(drawn).polygon(found["points"], fill=1)
    if "points" in found and np.array_equal(np.array(drawn), mask):
        entry["segmentation"] = [[float(value) for point in found["points"] for value in point]]
    else:
        counts = code["counts"].decode()
        entry["segmentation"] = {"size": list(mask.shape), "counts": counts}
        if found["crowd"]:  # COCO has crowds as plain run lengths
            flat = mask.flatten(order="F")
            edges = np.flatnonzero(np.diff(np.concatenate([[0], flat, [1 - flat[-1]]])))
            entry["segmentation"]["counts"] = np.diff(np.concatenate([[0], edges])).tolist()
    return entry


def write_objects(root: Path, train: int = 8, val: int = 4, sizes=SIZES, seed: int = 0) -> Path:
    """Writes images and annotations as COCO has them, train2017 and val2017; returns the root."""
    rng = np.random.default_rng(seed)
    for part, count in (("train2017", train), ("val2017", val)):
        (root / part).mkdir(parents=True, exist_ok=True)
        (root / "annotations").mkdir(exist_ok=True)
        images, annotations = [], []
        for i in range(count):
            height, width = sizes[i % len(sizes)]
            crowd, empty = i % CROWD_EVERY == 1, i % EMPTY_EVERY == EMPTY_EVERY - 1
            image, objects = draw(rng, height, width, crowd, empty)
            name = f"{i + 1:012d}.jpg"
            Image.fromarray(image).save(root / part / name, quality=95)
            images.append({"id": i + 1, "file_name": name, "height": height, "width": width})
            annotations += [annotation(found, len(annotations) + 1 + k, i + 1) for k, found in enumerate(objects)]
        categories = [{"id": number, "name": name} for name, number in CATEGORIES.items()]
        contents = {"images": images, "annotations": annotations, "categories": categories}
        (root / "annotations" / f"instances_{part}.json").write_text(json.dumps(contents))
    return root


TINY = """
_base_ = ["{base}"]

# The tiny Cascade Mask R-CNN: wbmm_a (narrower unless told), an FPN and heads of {width} channels with one convolution,
# {rois} RoIs, images of {side} px; from scratch.
classes = ("disc", "square", "triangle")
norm = dict(type="SyncBN", requires_grad=True)
head = dict(in_channels={width}, conv_out_channels={width}, num_classes=3)
roi_extractor = dict(out_channels={width})
scales = [({side} * 7 // 8, 2 * {side}), ({side}, 2 * {side})]
model = dict(
    backbone=dict(
        arch="wbmm_a", dims={dims}, drop_path_rate=0.0, with_cp={with_cp}, ls_init_value=0.1, init_cfg={init}
    ),
    neck=dict(in_channels={dims}, out_channels={width}, norm_cfg=norm),
    rpn_head=dict(in_channels={width}, feat_channels={width}, anchor_generator=dict(scales=[{anchor}])),
    roi_head=dict(
        bbox_roi_extractor=roi_extractor,
        bbox_head=[
            dict(
                type="ConvFCBBoxHead",
                num_shared_convs=1,
                num_shared_fcs=1,
                fc_out_channels={fc},
                roi_feat_size=7,
                bbox_coder=dict(
                    type="DeltaXYWHBBoxCoder", target_means=[0.0] * 4, target_stds=[place, place, size, size]
                ),
                reg_class_agnostic=False,
                reg_decoded_bbox=True,
                norm_cfg=norm,
                loss_cls=dict(type="CrossEntropyLoss", use_sigmoid=False, loss_weight=1.0),
                loss_bbox=dict(type="GIoULoss", loss_weight=10.0),
                **head,
            )
            for place, size in ((0.1, 0.2), (0.05, 0.1), (0.033, 0.067))
        ],
        mask_roi_extractor=roi_extractor,
        mask_head=dict(num_convs={mask_convs}, norm_cfg=norm, **head),
    ),
    train_cfg=dict(
        rpn=dict(sampler=dict(num=64)),
        rpn_proposal=dict(nms_pre=200, max_per_img={rois}),
        rcnn=[
            dict(
                assigner=dict(
                    type="MaxIoUAssigner",
                    pos_iou_thr=overlap,
                    neg_iou_thr=overlap,
                    min_pos_iou=overlap,
                    match_low_quality=False,
                    ignore_iof_thr=-1,
                ),
                sampler=dict(
                    type="RandomSampler", num={rois}, pos_fraction=0.25, neg_pos_ub=-1, add_gt_as_proposals=True
                ),
                mask_size=28,
                pos_weight=-1,
                debug=False,
            )
            for overlap in (0.5, 0.6, 0.7)
        ],
    ),
    test_cfg=dict(rpn=dict(nms_pre=200, max_per_img={rois}), rcnn=dict(score_thr={score})),
)
train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", with_bbox=True, with_mask=True),
    dict(type="RandomFlip", prob=0.5),
    dict(type="RandomChoiceResize", scales=scales, keep_ratio=True),
    dict(type="PackDetInputs"),
]
test_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="Resize", scale=scales[-1], keep_ratio=True),
    dict(type="LoadAnnotations", with_bbox=True, with_mask=True),
    dict(type="PackDetInputs", meta_keys=("img_id", "img_path", "ori_shape", "img_shape", "scale_factor")),
]
loader = dict(num_workers=0, persistent_workers=False)
data = dict(metainfo=dict(classes=classes), data_root="{data}")
train_dataloader = dict(
    batch_size={batch},
    batch_sampler=None,  # portrait and landscape images in one batch
    dataset=dict(pipeline=train_pipeline, filter_cfg=dict(filter_empty_gt=False, min_size=8), **data),
    **loader,
)
val_dataloader = dict(dataset=dict(pipeline=test_pipeline, **data), **loader)
test_dataloader = val_dataloader
val_evaluator = dict(ann_file="{data}/annotations/instances_val2017.json")
test_evaluator = val_evaluator
optim_wrapper = dict(
    optimizer=dict(lr={lr}), paramwise_cfg=dict(decay_rate=1.0, groups=None), clip_grad=dict(max_norm=10.0)
)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.1, by_epoch=False, begin=0, end={warmup}),
    dict(
        type="MultiStepLR", by_epoch=True, begin=0, end={epochs},
        milestones=[{epochs} * 3 // 4, {epochs} * 11 // 12], gamma=0.1,
    ),
]
train_cfg = dict(max_epochs={epochs}, val_interval={epochs})
default_hooks = dict(logger=dict(interval=1), checkpoint=dict(max_keep_ckpts=9))
"""
BASE = Path(__file__).parents[2] / "configs" / "coco" / "wbmm-t-dense_cascade-mask-rcnn_8xb2-3x_coco.py"
DEFAULTS = {
    **{
        "dims": [8, 16, 32, 64],
        "init": None,
        "with_cp": False,
        "width": 16,
        "fc": 32,
        "rois": 16,
        "side": 96,
        "mask_convs": 1,
    },
    **{"batch": 2, "epochs": 2, "warmup": 2, "lr": 1e-3, "anchor": 4, "score": 0.0},
}


def write_config(path: Path, data: Path, **changes) -> Path:
    """A configuration that trains on such data; narrow unless told otherwise."""
    path.write_text(TINY.format(base=BASE, data=data, **{**DEFAULTS, **changes}))
    return path
