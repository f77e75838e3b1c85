"""Finds a configuration: a file, a name in the project's configs, or a row of the paper's tables.

configs/imagenet/wbmm_t.yaml     a path; what does not exist here is looked for in the project's configs
imagenet/wbmm_t                  the same by name
table:windows/hier               a row of paper_tables.yaml with the ImageNet recipe, or in a segmentor
table:windows/hier@fashion_mnist the same with the small recipe
"""

import difflib
from collections.abc import Iterable
from pathlib import Path

from .paper_tables import Row, Table, load_tables
from .zoo import ZooModel, load_zoo

__all__ = ["SMALL_RECIPES", "find_config", "resolve_config", "run_name"]

PACKAGE = Path(__file__).parent
PREFIX = "table:"
MOST_NAMES = 10  # in an error
SMALL_RECIPES = {"fashion_mnist": "fashion_mnist_small.yaml"}
SEGMENTATION = "ade20k/wbmm-t-hier_upernet_8xb2-160k_ade20k-512x512.py"


def configs_folder() -> Path:
    """In a wheel it is inside of the package, in a checkout beside it."""
    inside = PACKAGE / "configs"
    return inside if inside.is_dir() else PACKAGE.parent / "configs"


def find_config(name: str | Path, ending: str = ".yaml") -> Path:
    """The file of a configuration.

    Args:
        name: a path, or a name in the configs folder, with or without its ending: `imagenet/wbmm_t`.
        ending: `.yaml` for training, `.py` for MMSegmentation and MMDetection.
    """
    path, folder = Path(name), configs_folder()
    for here in (path, Path(f"{name}{ending}")):
        if here.is_file():
            return here
    inside = Path(*path.parts[1:]) if path.parts[:1] == ("configs",) else path
    for candidate in (folder / inside, folder / f"{inside}{ending}"):
        if not path.is_absolute() and candidate.is_file():
            return candidate
    files = (file.relative_to(folder) for file in sorted(folder.rglob(f"*{ending}")))
    known = [file.with_suffix("").as_posix() for file in files if not any(part[0] == "_" for part in file.parts)]
    wanted = inside.as_posix().removesuffix(ending)
    pictures = ending == ".yaml" and (path.is_dir() or path.suffix == ".csv")
    advice = f"to train on pictures: wbmm train --data {name}" if pictures else _nearest(wanted, known)
    raise ValueError(f"{name}: there is no such configuration file; {advice}")


def resolve_config(name: str | Path, ending: str = ".yaml", task: str = "segmentation") -> tuple[Path, dict]:
    """The file of a configuration, and what a row of a table changes in it (nothing for a file).

    Args:
        name: as of `find_config`, or `table:NAME/ROW[@RECIPE]`.
        ending: as of `find_config`.
        task: of a `.py` configuration.
    """
    if not str(name).startswith(PREFIX):
        return find_config(name, ending), {}
    if task == "detection":
        raise ValueError(f"{name}: the paper's ablations are on classification and ADE20K; a detector takes coco/...")
    table, row, recipe = _find_row(str(name))
    if ending == ".py":
        return _segmentation(table, row, recipe)
    return _small(row, recipe) if recipe in SMALL_RECIPES else _imagenet(table, row)


def run_name(model: str, args: dict) -> str:
    """The net in the name of a folder, e.g. `wbmm_t_dense-window_size-14-14-14-7`: the same net has the same name."""
    parts = [model]
    for key, value in args.items():
        text = "-".join(map(str, value)) if isinstance(value, list) else str(value)
        parts.append(f"{key}-{text}".replace("(", "").replace(")", ""))
    return "-".join(parts)


def _nearest(name: str, known: Iterable[str]) -> str:
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    near = near or [other for other in known if name and name in other][:3]
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"expected {', '.join(known[:MOST_NAMES])}{', ...' if len(known) > MOST_NAMES else ''}"


def _find_row(name: str) -> tuple[Table, Row, str]:
    place, _, recipe = name.removeprefix(PREFIX).partition("@")
    table_name, _, row_id = place.partition("/")
    tables = load_tables()
    if table_name not in tables:
        raise ValueError(f"{name}: no table {table_name!r}; {_nearest(table_name, tables)}")
    table = tables[table_name]
    rows = {row.id: row for row in table.rows}
    if row_id not in rows:
        raise ValueError(f"{name}: table {table_name!r} has no row {row_id!r}; {_nearest(row_id, rows)}")
    if recipe and recipe not in ("imagenet", *SMALL_RECIPES):
        raise ValueError(f"{name}: no recipe {recipe!r}; {_nearest(recipe, ('imagenet', *SMALL_RECIPES))}")
    return table, rows[row_id], recipe


def _imagenet(table: Table, row: Row) -> tuple[Path, dict]:
    if not row.recipe:
        raise ValueError(
            f"table:{table.name}/{row.id} has no ImageNet recipe (at 224 px it is the net of its baseline); "
            f"expected @{' or @'.join(SMALL_RECIPES)}" + (", or tools/train_seg.py" if table.ade20k else "")
        )
    model, args = _net(row)
    changes = {"model": {"name": model, "args": args}, "out": f"runs/{run_name(model, args)}"}
    for key, value in table.recipe_changes.items():
        changes[key] = {**changes.get(key, {}), **value}
    return find_config(f"imagenet/{row.recipe}"), changes


def _small(row: Row, recipe: str) -> tuple[Path, dict]:
    if row.large_kernel:
        raise ValueError(
            f"row {row.id!r} is for the large-kernel package alone, which makes no difference to what a net learns; "
            f"train {row.id.removesuffix('-lka')!r}"
        )
    model, args = _simplest(row.small_model, row.small_args)
    out = f"runs/ablations/{recipe}/{run_name(model, args)}"
    return find_config(SMALL_RECIPES[recipe]), {"model": {"name": model, "args": args}, "out": out}


def _segmentation(table: Table, row: Row, recipe: str) -> tuple[Path, dict]:
    """Starts from the row's own ImageNet run; where it has none, from that of the configuration it is based on."""
    if not table.ade20k or recipe:
        known = [name for name, other in load_tables().items() if other.ade20k]
        what = f"recipe {recipe!r} is for classification" if table.ade20k else "its rows are not for segmentation"
        raise ValueError(f"table:{table.name}/{row.id}: {what}; a segmentor takes a row of {', '.join(known)}")
    model, args = _net(row)
    backbone = {"arch": model, **args}
    if row.recipe:
        backbone["init_cfg"] = {"checkpoint": f"runs/{run_name(model, args)}/best.pt"}
    path = find_config(SEGMENTATION, ".py")
    folder = f"work_dirs/{run_name(model, args)}_{path.stem.partition('_')[2]}"
    return path, {"model": {"backbone": backbone}, "work_dir": folder}


def _net(row: Row) -> tuple[str, dict]:
    model, args = _simplest(row.model, row.args)
    return model, {**args, "large_kernel": "implicit_gemm"} if row.large_kernel else args


def _simplest(name: str, args: dict) -> tuple[str, dict]:
    """The same net as the model of the zoo that needs the fewest arguments, so that it has one name in all tables."""
    zoo = load_zoo()
    if name not in zoo or "dims" in args or "depths" in args:
        return name, args
    given = zoo[name]
    net = _structure(given) | {key: args[key] for key in _structure(given) if key in args}
    rest = {key: value for key, value in args.items() if key not in net and (key, value) != ("padding_mode", "zeros")}
    variants = [model for model in zoo.values() if _size(model.name) == _size(name)]
    written = {model.name: {k: v for k, v in net.items() if v != _structure(model)[k]} for model in variants}
    best = min(written, key=lambda other: len(written[other]))  # the zoo's first among equals
    return best, {**written[best], **rest}


def _structure(model: ZooModel) -> dict:
    return {"pattern": list(model.pattern), "window_size": list(model.window), "mixer": model.mixer}


def _size(name: str) -> str:
    """`wbmm_t` of wbmm_t, wbmm_t_dense and wbmm_t_hier, which differ in patterns and windows alone."""
    return name.removesuffix("_dense").removesuffix("_hier")
