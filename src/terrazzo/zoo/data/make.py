"""Making the three sets: detection, segmentation, classification."""

from __future__ import annotations

from pathlib import Path

from numpy.random import RandomState

from terrazzo.zoo.data import codec, store
from terrazzo.zoo.data.paint import CLASSES, Picture, paint
from terrazzo.zoo.data.store import Entry, Recipe

MOST_SHAPES = 6
SEVERAL = (160, 400)
"""Sides of one shape among several, in thousandths of the picture."""
ALONE = (350, 800)


def make_detection(folder: Path, *, count: int, size: int, seed: int) -> Path:
    """Pictures (JPEG) with 1 to 6 shapes and the boxes around them.

    Does nothing if this set is there already, and never overwrites another.
    """
    recipe = Recipe("detection", count, size, seed)
    return store.ensure(folder, recipe, lambda fresh: _several(fresh, recipe, masks=False))


def make_segmentation(folder: Path, *, count: int, size: int, seed: int) -> Path:
    """The pictures of ``make_detection`` with masks (PNG): 0 is ground, 1 + class a shape."""
    recipe = Recipe("segmentation", count, size, seed)
    return store.ensure(folder, recipe, lambda fresh: _several(fresh, recipe, masks=True))


def make_classification(folder: Path, *, count: int, size: int, seed: int) -> Path:
    """Pictures (PNG) with one shape each; classes take turns."""
    recipe = Recipe("classification", count, size, seed)
    return store.ensure(folder, recipe, lambda fresh: _single(fresh, recipe))


def _draw(recipe: Recipe, index: int) -> RandomState:
    """Each picture has numbers of its own: a larger set begins with the smaller one."""
    return RandomState([recipe.seed % (1 << 32), recipe.size, index])


def _several(fresh: Path, recipe: Recipe, *, masks: bool) -> list[Entry]:
    entries = []
    for index in range(recipe.count):
        picture = paint(_draw(recipe, index), recipe.size, most=MOST_SHAPES, sides=SEVERAL)
        boxes = [[shape.label, *shape.box] for shape in picture.shapes]
        entry = _write(fresh, index, picture, kind="jpg", mask=masks)
        entries.append({**entry, "boxes": boxes})
    return entries


def _single(fresh: Path, recipe: Recipe) -> list[Entry]:
    entries = []
    for index in range(recipe.count):
        label = index % len(CLASSES)
        draw = _draw(recipe, index)
        picture = paint(draw, recipe.size, most=1, sides=ALONE, label=label)
        entries.append({**_write(fresh, index, picture, kind="png"), "label": label})
    return entries


def _write(fresh: Path, index: int, picture: Picture, *, kind: str, mask: bool = False) -> Entry:
    name = f"pictures/{index:06}.{kind}"
    (fresh / "pictures").mkdir(exist_ok=True)
    sizes = {name: codec.write(fresh / name, picture.pixels)}
    if not mask:
        return {"picture": name, "bytes": sizes}
    mask_name = f"masks/{index:06}.png"
    (fresh / "masks").mkdir(exist_ok=True)
    sizes[mask_name] = codec.write(fresh / mask_name, picture.mask)
    return {"picture": name, "mask": mask_name, "bytes": sizes}
