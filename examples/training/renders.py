"""Pictures with one thing to say each, and what they say: shapes, a digit, a short word."""

from __future__ import annotations

import functools
import math
import random
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

SIZE = 96
PATCH = 24
SLOTS = (SIZE // PATCH) ** 2  # embeddings that a picture becomes
PAD = "\n\n\n\n"  # one token: what a slot says behind the caption's
COLOURS = {
    "red": (214, 40, 40), "blue": (38, 84, 214), "green": (30, 150, 62), "yellow": (238, 200, 20),
    "purple": (132, 48, 176), "orange": (240, 130, 20), "black": (20, 20, 20),
    "pink": (240, 120, 180),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "star")
NUMBERS = ("one", "two", "three", "four", "five")
WORDS = (
    "cat", "dog", "sun", "car", "tree", "fish", "bird", "moon", "ship", "rain", "book", "door",
    "key", "cup", "hat", "milk", "road", "star", "wolf", "leaf", "ring", "bell", "lamp", "sand",
    "ice", "bee", "fox", "map", "pen", "nut",
)  # fmt: skip

_KINDS = {"shapes": 6, "digit": 5, "word": 9}  # and how often: words take longest to learn

Mark = tuple[float, float, str]  # x, y and name of a shape, letter or digit


@dataclass(frozen=True, slots=True)
class Scene:
    """What one picture shows; `kind` tells which of the fields it has."""

    kind: str  # shapes | digit | word
    colour: str
    shape: str = ""
    count: int = 0
    text: str = ""

    @property
    def caption(self) -> str:
        """What the picture says, in few words."""
        if self.kind == "shapes":
            plural = "" if self.count == 1 else "s"
            return f"{NUMBERS[self.count - 1]} {self.colour} {self.shape}{plural}"
        return f"the {self.kind} {self.text} in {self.colour}"

    @property
    def pieces(self) -> list[str]:
        """The caption and its full stop as the model's tokenizer cuts it, one token each."""
        pieces = [[" ", w] if w.isdigit() else [f" {w}"] for w in self.caption.split()]
        return [*(p for some in pieces for p in some), "."]

    @property
    def slots(self) -> list[str]:
        """What each of a picture's slots is to say."""
        return self.pieces + [PAD] * (SLOTS - len(self.pieces))


@dataclass(frozen=True, slots=True)
class Drawn:
    """A scene, its picture of 96 x 96 pixels, and where in it things are."""

    scene: Scene
    image: Image.Image
    marks: list[Mark]


def any_scene(rng: random.Random) -> Scene:
    """A random scene."""
    return _scene_in(rng.choice(tuple(COLOURS)), rng)


def _scene_in(colour: str, rng: random.Random) -> Scene:
    (kind,) = rng.choices(tuple(_KINDS), tuple(_KINDS.values()))
    if kind == "shapes":
        return Scene(kind, colour, rng.choice(SHAPES), rng.randint(1, len(NUMBERS)))
    return Scene(kind, colour, text=rng.choice(WORDS) if kind == "word" else str(rng.randrange(10)))


def all_scenes() -> list[Scene]:
    """Every scene there is."""
    counts = range(1, len(NUMBERS) + 1)
    return [
        *(Scene("shapes", c, s, n) for c in COLOURS for s in SHAPES for n in counts),
        *(Scene("word", c, text=w) for c in COLOURS for w in WORDS),
        *(Scene("digit", c, text=str(d)) for c in COLOURS for d in range(10)),
    ]


def draw_scene(rng: random.Random) -> Drawn:
    """A random scene and its picture; places, sizes and shades vary."""
    colour = rng.choice(tuple(COLOURS))
    light = rng.randrange(225, 256)
    paper = (light, light - rng.randrange(8), light - rng.randrange(8))
    image = Image.new("RGB", (SIZE, SIZE), paper)
    scene = _scene_in(colour, rng)
    draw = ImageDraw.Draw(image)
    marks = (_draw_shapes if scene.kind == "shapes" else _draw_text)(draw, scene, rng)
    return Drawn(scene, image, marks)


def _paint(colour: str, rng: random.Random) -> tuple[int, int, int]:
    red, green, blue = (min(255, max(0, c + rng.randint(-14, 14))) for c in COLOURS[colour])
    return red, green, blue


def _draw_shapes(draw: ImageDraw.ImageDraw, scene: Scene, rng: random.Random) -> list[Mark]:
    marks = []
    side = SIZE // PATCH
    cells = [(x, y) for x in range(side) for y in range(side)]
    for column, row in rng.sample(cells, scene.count):
        radius = rng.uniform(7, 11)
        x = PATCH * (column + 0.5) + rng.uniform(-1.5, 1.5)
        y = PATCH * (row + 0.5) + rng.uniform(-1.5, 1.5)
        paint = _paint(scene.colour, rng)
        box = (x - radius, y - radius, x + radius, y + radius)
        if scene.shape == "circle":
            draw.ellipse(box, fill=paint)
        elif scene.shape == "square":
            draw.rectangle(box, fill=paint)
        else:
            draw.polygon(_corners(scene.shape, x, y, radius, rng), fill=paint)
        marks.append((x, y, scene.shape))
    return marks


def _corners(
    shape: str, x: float, y: float, radius: float, rng: random.Random
) -> list[tuple[float, float]]:
    turn = -math.pi / 2 + rng.uniform(-0.2, 0.2)
    num, radii = (3, (1.15,)) if shape == "triangle" else (10, (1.2, 0.48))
    return [
        (
            x + radius * radii[i % len(radii)] * math.cos(turn + 2 * math.pi * i / num),
            y + radius * radii[i % len(radii)] * math.sin(turn + 2 * math.pi * i / num),
        )
        for i in range(num)
    ]


def _draw_text(draw: ImageDraw.ImageDraw, scene: Scene, rng: random.Random) -> list[Mark]:
    size = rng.randint(46, 70) if scene.kind == "digit" else rng.randint(28, 34)
    font = _font(size)
    left, top, right, bottom = draw.textbbox((0, 0), scene.text, font=font)
    x = _near_middle(right - left, rng) - left
    y = _near_middle(bottom - top, rng) - top
    draw.text((x, y), scene.text, font=font, fill=_paint(scene.colour, rng))
    ends = [font.getlength(scene.text[:i]) for i in range(len(scene.text) + 1)]
    middle = y + (top + bottom) / 2
    return [(x + (ends[i] + ends[i + 1]) / 2, middle, c) for i, c in enumerate(scene.text)]


def _near_middle(length: float, rng: random.Random) -> float:
    """Where something of that length begins, up to 14 pixels from the middle, inside."""
    room = min(14.0, max(1.0, (SIZE - length) / 2 - 2))
    return (SIZE - length) / 2 + rng.uniform(-room, room)


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont)  # not so where Pillow lacks FreeType
    return font
