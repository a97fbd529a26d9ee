"""Pictures of one coloured shape, drawn from a seed: what the tiny K3's vision is trained on.

Input: a seed. Output: a small RGB picture with one of 8 colours and 6 shapes, at any place, size
and angle, on a noisy background; the same for a seed every time. Six pairs of colour and shape are
never drawn for training.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

COLOURS = {
    "red": (215, 40, 40),
    "green": (40, 165, 60),
    "blue": (40, 80, 215),
    "yellow": (240, 215, 50),
    "white": (245, 245, 245),
    "black": (20, 20, 20),
    "purple": (130, 50, 170),
    "pink": (245, 140, 190),
}
SHAPES = ("circle", "square", "triangle", "cross", "star", "ring")
UNSEEN = (
    ("red", "star"),
    ("green", "ring"),
    ("blue", "triangle"),
    ("yellow", "circle"),
    ("purple", "square"),
    ("white", "cross"),
)
"""Pairs that training never shows, though it shows each colour and each shape."""
SEEN = tuple((c, s) for c in COLOURS for s in SHAPES if (c, s) not in UNSEEN)
SMALLEST, LARGEST, N_ROWS = 85, 112, 16
"""Pixels on each side, and the rows that the text model gets for each of these pictures."""
TRAINING_SEEDS = 1_000_000
"""Training draws from this seed on; what is measured has smaller ones."""
PROMPT = "The picture shows a"
FINE = 4
"""The outline is drawn this many times as large, so that its edges are smooth."""

Size = tuple[int, int]


class Drawn(NamedTuple):
    image: Image.Image
    colour: str
    shape: str

    @property
    def answer(self) -> str:
        """What goes on after PROMPT."""
        return f" {self.colour} {self.shape}."


def outline(shape: str) -> list[tuple[float, float]]:
    """Corners within the unit circle; a ring's hole is cut out later."""
    if shape == "cross":
        arm, tip = 0.33, 0.94
        quarter = [(arm, tip), (arm, arm), (tip, arm)]
        turns = [(1, 1, False), (1, -1, True), (-1, -1, False), (-1, 1, True)]
        return [
            (x * sx, y * sy)
            for sx, sy, backwards in turns
            for x, y in (quarter[::-1] if backwards else quarter)
        ]
    n, inner = {"square": (4, 1.0), "triangle": (3, 1.0), "star": (10, 0.42)}.get(shape, (48, 1.0))
    start = math.pi / 4 if shape == "square" else math.pi / 2
    radii = [inner if i % 2 else 1.0 for i in range(n)]
    angles = [start + 2 * math.pi * i / n for i in range(n)]
    return [(r * math.cos(a), -r * math.sin(a)) for r, a in zip(radii, angles, strict=True)]


def coverage(shape: str, size: Size, rng: np.random.Generator) -> np.ndarray:
    """[height, width, 1]: the share of each pixel that the shape covers."""
    radius = rng.uniform(0.26, 0.46) * min(size)
    x, y = (rng.uniform(radius, side - radius) for side in size)
    angle = rng.uniform(-0.3, 0.3)
    cos, sin = radius * math.cos(angle), radius * math.sin(angle)
    mask = Image.new("L", (size[0] * FINE, size[1] * FINE))
    pen = ImageDraw.Draw(mask)
    corners = [(x + u * cos - v * sin, y + u * sin + v * cos) for u, v in outline(shape)]
    pen.polygon([(u * FINE, v * FINE) for u, v in corners], fill=255)
    if shape == "ring":
        hole = 0.55 * radius
        box = [x - hole, y - hole, x + hole, y + hole]
        pen.ellipse([side * FINE for side in box], fill=0)
    return np.asarray(mask.reduce(FINE), np.float64)[..., None] / 255


def background(colour: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A dull colour, far enough from the shape's."""
    while True:
        dull = rng.uniform(30, 225) + rng.uniform(-25, 25, 3)
        if np.linalg.norm(dull - colour) > 90:
            return dull


def picture_size(rng: np.random.Generator) -> Size:
    """Width and height in pixels."""
    width, height = rng.integers(SMALLEST, LARGEST + 1, 2).tolist()
    return width, height


def draw(seed: int, pairs: tuple[tuple[str, str], ...] = SEEN, size: Size | None = None) -> Drawn:
    """The picture of a seed: one of the pairs, in a size of its own unless one is given."""
    rng = np.random.default_rng(seed)
    colour, shape = pairs[int(rng.integers(len(pairs)))]
    size = size or picture_size(rng)
    ink = np.array(COLOURS[colour]) + rng.uniform(-20, 20, 3)
    share = coverage(shape, size, rng)
    pixels = share * ink + (1 - share) * background(ink, rng)
    pixels = pixels + rng.normal(0, rng.uniform(2, 14), pixels.shape)
    return Drawn(Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8)), colour, shape)
