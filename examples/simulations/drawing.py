"""Pictures of simulations, and the files that they are written to."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import matplotlib as mpl
import numpy as np
from PIL import Image, ImageDraw


def write(path: Path, pictures: Sequence[np.ndarray]) -> None:
    """Write a picture, or a film of 25 pictures a second."""
    if path.suffix == ".mp4":
        import_module("imageio.v3").imwrite(path, np.stack(pictures), fps=25)  # with imageio-ffmpeg
        return
    first, *others = map(Image.fromarray, pictures)
    if path.suffix == ".png":
        first.save(path)
    else:
        first.save(path, save_all=True, append_images=others, duration=40, loop=0)


def coloured(values: np.ndarray, colours: str) -> np.ndarray:
    """Return a picture of values from 0 to 1, in a colour map of Matplotlib."""
    return np.ascontiguousarray(mpl.colormaps[colours](values, bytes=True)[..., :3])


def lit(surfaces: Sequence[np.ndarray], colours: Sequence[tuple[int, int, int]]) -> np.ndarray:
    """Draw surfaces in space lit from above, of shape (3, h, w); distant parts are drawn first."""
    polygons, faces = list[np.ndarray](), list[np.ndarray]()
    for surface, colour in zip(surfaces, colours, strict=True):
        corners = [surface[:, :-1, :-1], surface[:, 1:, :-1], surface[:, 1:, 1:], surface[:, :-1, 1:]]
        quads = np.stack(corners, axis=-1).reshape(3, -1, 4)
        normals = np.cross(quads[..., 2] - quads[..., 0], quads[..., 3] - quads[..., 1], axis=0)
        light = np.abs(np.array([0.3, -0.5, 0.8]) @ normals) / (np.linalg.norm(normals, axis=0) + 1e-12)
        polygons.append(quads)
        faces.append((np.minimum(0.25 + 0.75 * light, 1)[:, None] * colour).astype(int))
    quads, paint = np.concatenate(polygons, axis=1), np.concatenate(faces)
    right, away = np.array([0.8, 0.6, 0]), np.array([-0.54, 0.72, -0.44])
    across = 500 * np.stack([right, np.cross(away, right)])
    places = np.einsum("ai,ijk->jka", across, quads) + np.array([200, 250])
    image = Image.new("RGB", (800, 800), "white")
    for k in np.argsort(-np.einsum("i,ijk->j", away, quads)):
        ImageDraw.Draw(image).polygon([(x, y) for x, y in places[k].tolist()], fill=tuple(paint[k].tolist()))
    return np.asarray(image.resize((400, 400)))
