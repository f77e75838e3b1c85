"""Where the pictures of `wbmm segment` and `wbmm detect` go."""

from pathlib import Path

from wbmm.deploy.atomic import check_target

__all__ = ["picture_targets"]


def picture_targets(folder: Path, paths: list[Path], force: bool) -> list[Path]:
    """A picture for each image, all checked before the work starts; equal names get a number."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the folder {folder}: {error.strerror}") from None
    taken: dict[str, int] = {}
    targets = []
    for path in paths:
        number = taken[path.stem] = taken.get(path.stem, 0) + 1
        targets.append(folder / f"{path.stem}{f'-{number}' if number > 1 else ''}.png")
    inputs = {path.resolve() for path in paths}
    for target in targets:
        if target.resolve() in inputs:
            raise ValueError(f"{target} is one of the images to read: choose another folder with --out")
        check_target(target, force)
    return targets
