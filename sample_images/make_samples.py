"""Make the sample images: twenty digits, nine pictures of five digits each, and five
computed pictures that look like photographs.

    python sample_images/make_samples.py

Every pixel is computed here (ray tracing, height fields, noise), so nobody else holds
rights in the pictures, and together they cover what image files come as: colour and
grey, JPEG and PNG, square and not, 8 and 16 bits, with and without transparency. The
digits, alone and in fives, are drawn as those that the shipped networks were trained
on, but from another seed.

In this file an image is an array [H, W] or [H, W, 3] of linear light, about 0..1, until
it is saved; lists of points, directions and colours are arrays [..., 3]."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "configs"))
import train_digits_cnn  # noqa: E402
import train_pairs_vit  # noqa: E402

Array = NDArray[np.floating[Any]]  # float32 wherever there is much of it
Mask = NDArray[np.bool_]
Texture = Callable[[Array], Array]  # points [N, 3] to colours [N, 3]

FAR = np.float32(1e9)


# ---------------------------------------------------------------------------------------------
# Small helpers


def vec(*values: float) -> Array:
    """Return the values as one array."""
    return np.array(values, dtype=np.float32)


def unit(vectors: Array) -> Array:
    """Scale vectors [..., 3] to length 1."""
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(vectors / np.maximum(length, 1e-9), dtype=np.float32)


def dot(a: Array, b: Array) -> Array:
    """Multiply vectors [..., 3] to numbers [...]."""
    return np.asarray((a * b).sum(-1), dtype=np.float32)


def step(low: float, high: float, values: Array) -> Array:
    """Rise smoothly from 0 at ``low`` to 1 at ``high`` (or fall, if ``low`` is the
    larger)."""
    t = np.clip((values - low) / (high - low), 0, 1)
    return np.asarray(t * t * (3 - 2 * t), dtype=np.float32)


def mix(a: Array, b: Array, share: Array) -> Array:
    """Blend colours [..., 3]: ``a`` where ``share`` [...] is 0, ``b`` where it is 1."""
    return np.asarray(a + (b - a) * share[..., None], dtype=np.float32)


def shrink(image: Array, by: int) -> Array:
    """Average blocks of ``by`` x ``by`` pixels: [H * by, W * by, C] to [H, W, C]."""
    high, wide, channels = image.shape
    blocks = image.reshape(high // by, by, wide // by, by, channels)
    return np.asarray(blocks.mean((1, 3)), dtype=np.float32)


def encode(light: Array) -> NDArray[np.uint8]:
    """Turn linear light 0..1 into display values 0..255."""
    return np.round(np.clip(light, 0, 1) ** (1 / 2.2) * 255).astype(np.uint8)


class Noise:
    """Smooth random numbers in space: one value (0..1) for every point with ``dims``
    numbers.

    Corners of a lattice with a random value each, smoothly interpolated; repeats every
    64 units."""

    def __init__(self, seed: int, dims: int = 3) -> None:
        shape = (64,) * dims
        self.dims = dims
        self.table = np.random.default_rng(seed).random(shape, dtype=np.float32)

    def __call__(self, points: Array) -> Array:
        """Return the values [...] at points [..., dims]."""
        floor = np.floor(points)
        part = points - floor
        part = part * part * (3 - 2 * part)
        cell = floor.astype(np.int32)
        total = np.zeros(points.shape[:-1], dtype=np.float32)
        for corner in itertools.product((0, 1), repeat=self.dims):
            weight = np.ones_like(total)
            for axis, side in enumerate(corner):
                weight *= part[..., axis] if side else 1 - part[..., axis]
            index = tuple(
                (cell[..., axis] + side) & 63 for axis, side in enumerate(corner)
            )
            total += weight * self.table[index]
        return total

    def octaves(self, points: Array) -> Iterator[tuple[float, Array]]:
        """Yield weight and values [...] at ever finer scales, without end."""
        for level in itertools.count():
            # Odd factors and shifts keep the lattices of the levels from lining up.
            yield (
                0.5 ** (level + 1),
                self(points * np.float32(2.03**level) + np.float32(level * 9)),
            )

    def fractal(self, points: Array, levels: int) -> Array:
        """Return values [...] in 0..1 with detail at ``levels`` scales."""
        return sum_up((w, v) for w, v in itertools.islice(self.octaves(points), levels))

    def ridges(self, points: Array, levels: int) -> Array:
        """Return values [...] in 0..1 with sharp crests, as mountains have."""
        layers = itertools.islice(self.octaves(points), levels)
        return sum_up((w, (1 - np.abs(2 * v - 1)) ** 2) for w, v in layers)


def sum_up(layers: Iterator[tuple[float, Array]]) -> Array:
    """Return the mean of the layers by their weights."""
    weights, total = 0.0, np.zeros((), dtype=np.float32)
    for weight, values in layers:
        weights += weight
        total = total + values * np.float32(weight)
    return np.asarray(total / np.float32(weights), dtype=np.float32)


@dataclass(frozen=True)
class Camera:
    """A camera at ``eye`` that looks at ``target``; ``zoom`` is focal length / half
    height."""

    eye: Array
    target: Array
    zoom: float
    wide: int  # pixels
    high: int  # pixels

    def rays(self, dx: float, dy: float) -> Array:
        """Return directions [wide * high, 3] through the points (dx, dy) in 0..1 of the
        pixels."""
        ahead = unit(self.target - self.eye)
        right = unit(np.cross(ahead, vec(0, 1, 0)).astype(np.float32))
        up = np.cross(right, ahead).astype(np.float32)
        rows, columns = np.mgrid[0 : self.high, 0 : self.wide].astype(np.float32)
        x = (2 * (columns + np.float32(dx)) - self.wide) / self.high
        y = 1 - 2 * (rows + np.float32(dy)) / self.high
        way = x[..., None] * right + y[..., None] * up + np.float32(self.zoom) * ahead
        return unit(way.reshape(-1, 3))

    def average(
        self, trace: Callable[[Array, float, float], Array], side: int
    ) -> Array:
        """Average ``side`` x ``side`` rays a pixel to an image [high, wide, C].

        ``trace`` gets the rays and two numbers in 0..1 that differ from pass to pass
        (they choose a point on a lamp, which gives soft shadows), and returns light [N,
        C]."""
        total: Array = np.zeros((), dtype=np.float32)
        for number, (i, j) in enumerate(itertools.product(range(side), repeat=2)):
            # an order unlike that of the pixel positions
            turn = (number * 7 + 3) % side**2
            lamp = ((turn % side + 0.5) / side, (turn // side + 0.5) / side)
            total = total + trace(self.rays((i + 0.5) / side, (j + 0.5) / side), *lamp)
        return np.asarray(total / side**2, dtype=np.float32).reshape(
            self.high, self.wide, -1
        )


# ---------------------------------------------------------------------------------------------
# Balls on a floor


@dataclass(frozen=True)
class Thing:
    """Something to see: a ball, a pillar (upright, on the floor) or the floor itself."""

    kind: str
    texture: Texture
    centre: Array = field(default_factory=lambda: vec(0, 0, 0))
    radius: float = 1.0
    height: float = 0.0  # of a pillar
    mirror: float = 0.04  # share of light that is reflected straight on
    shine: float = 0.5  # strength of the highlight

    def hit(self, start: Array, way: Array) -> Array:
        """Return how far [N] along the rays this is, ``FAR`` where they miss it."""
        return {
            "ball": self._hit_ball,
            "pillar": self._hit_pillar,
            "floor": self._hit_floor,
        }[self.kind](start, way)

    def _hit_ball(self, start: Array, way: Array) -> Array:
        away = start - self.centre
        half = dot(away, way)
        root = half**2 - dot(away, away) + self.radius**2
        distance = -half - np.sqrt(np.maximum(root, 0))
        return np.where((root > 0) & (distance > 1e-3), distance, FAR)

    def _hit_floor(self, start: Array, way: Array) -> Array:
        down = np.minimum(way[:, 1], -1e-6)
        distance = -start[:, 1] / down
        return np.where((way[:, 1] < 0) & (distance > 1e-3), distance, FAR)

    def _hit_pillar(self, start: Array, way: Array) -> Array:
        flat = vec(1, 0, 1)
        away, along = (start - self.centre) * flat, way * flat
        a = np.maximum(dot(along, along), 1e-9)
        half = dot(away, along) / a
        root = half**2 - (dot(away, away) - self.radius**2) / a
        side = -half - np.sqrt(np.maximum(root, 0))
        y = start[:, 1] + side * way[:, 1]
        side = np.where(
            (root > 0) & (side > 1e-3) & (y > 0) & (y < self.height), side, FAR
        )
        return np.minimum(side, self._hit_top(start, way))

    def _hit_top(self, start: Array, way: Array) -> Array:
        fall = np.where(np.abs(way[:, 1]) < 1e-6, 1e-6, way[:, 1])
        top = np.clip((self.height - start[:, 1]) / fall, -FAR, FAR)
        off = (start + top[:, None] * way - self.centre) * vec(1, 0, 1)
        return np.where((top > 1e-3) & (dot(off, off) < self.radius**2), top, FAR)

    def normals(self, points: Array) -> Array:
        """Return the directions [N, 3] straight out of the surface at points [N, 3] on
        it."""
        up = np.broadcast_to(vec(0, 1, 0), points.shape)
        if self.kind == "floor":
            return up
        if self.kind == "ball":
            return unit(points - self.centre)
        around = unit((points - self.centre) * vec(1, 0, 1))
        return np.where(points[:, 1:2] > self.height - 1e-3, up, around)


def plain(*colour: float) -> Texture:
    """Return a texture of one colour."""
    return lambda points: np.broadcast_to(vec(*colour), points.shape)


def marble(dark: Array, light: Array, scale: float) -> Texture:
    """Return a stone texture: thin dark veins through light stone."""
    noise = Noise(11)

    def texture(points: Array) -> Array:
        wave = (
            points[:, 0]
            + points[:, 1]
            + 5 * noise.fractal(points * np.float32(scale), 5)
        )
        vein = np.abs(np.sin(wave * np.float32(scale * 1.7))) ** 0.45
        return mix(dark, light, np.asarray(vein, dtype=np.float32))

    return texture


def wood(points: Array) -> Array:
    """Colour points [N, 3] as wood: rings around an axis, bent a little, and fine
    fibres."""
    noise = Noise(12)
    bent = points + (noise.fractal(points * np.float32(1.6), 2) - 0.5)[
        :, None
    ] * np.float32(0.35)
    rings = np.hypot(bent[:, 0] * 1.1 + 0.3, bent[:, 2] + 0.45 * bent[:, 1]) * 9
    ring = (rings % 1) ** 2
    fibre = noise.fractal(points * vec(60, 4, 60), 2)
    return mix(vec(0.50, 0.26, 0.10), vec(0.20, 0.075, 0.022), ring * 0.85) * (
        0.75 + 0.5 * fibre[:, None]
    )


def bricks(points: Array) -> Array:
    """Colour points [N, 3] of a pillar around x = z = 0 as a brick wall."""
    noise = Noise(13)
    row = np.floor(points[:, 1] / 0.2)
    turn = np.arctan2(points[:, 2], points[:, 0]) / np.float32(2 * np.pi) * 9 + 0.5 * (
        row % 2
    )
    from_edge = np.minimum(
        0.5 - np.abs(turn % 1 - 0.5), (0.5 - abs(points[:, 1] / 0.2 % 1 - 0.5))
    )
    grain = noise.fractal(points * np.float32(14), 4)
    tone = noise(
        np.stack([np.floor(turn) % 9 * 5.3, row * 3.7, row], -1).astype(np.float32)
    )
    clay = mix(vec(0.30, 0.085, 0.045), vec(0.52, 0.22, 0.12), tone) * (
        0.5 + grain[:, None]
    )
    mortar = vec(0.5, 0.47, 0.42) * (0.6 + 0.6 * grain[:, None])
    return mix(mortar, clay, step(0.06, 0.11, from_edge + 0.05 * (grain - 0.5)))


def tiles(points: Array) -> Array:
    """Colour points [N, 3] of the floor as polished stone tiles, light and dark by
    turns."""
    which = (np.floor(points[:, 0]) + np.floor(points[:, 2])) % 2
    light = marble(vec(0.42, 0.38, 0.33), vec(0.72, 0.69, 0.63), 1.1)(points)
    dark = marble(vec(0.16, 0.13, 0.11), vec(0.045, 0.055, 0.06), 1.4)(points + 7)
    joint = np.abs(points[:, ::2] % 1 - 0.5).max(-1)
    return mix(light, dark, which) * (1 - 0.6 * step(0.484, 0.492, joint))[:, None]


def sky(way: Array) -> Array:
    """Return the light [N, 3] of an afternoon sky in the directions ``way``, with some
    clouds."""
    rise = np.maximum(way[:, 1], 0)
    clear = mix(vec(0.80, 0.80, 0.80), vec(0.10, 0.25, 0.60), np.sqrt(rise))
    above = way[:, ::2] / (rise + 0.12)[:, None]
    cover = Noise(14, 2).fractal(np.ascontiguousarray(above * np.float32(1.3) + 20), 6)
    return mix(
        clear,
        vec(0.95, 0.93, 0.9),
        step(0.46, 0.72, cover) * step(0.0, 0.2, rise) * 0.9,
    )


def still_life() -> list[Thing]:
    """Return the floor, the pillar and the balls of the first picture."""
    pale = marble(vec(0.07, 0.12, 0.16), vec(0.80, 0.82, 0.80), 1.5)

    def ball(x: float, z: float, r: float, texture: Texture, **more: float) -> Thing:
        return Thing("ball", texture, vec(x, r, z), r, **more)

    post = vec(1.45, 0, 1.5)
    return [
        Thing("floor", tiles, mirror=0.06, shine=0.2),
        Thing(
            "pillar",
            lambda p: bricks(p - post),
            post,
            0.62,
            1.5,
            mirror=0.0,
            shine=0.02,
        ),
        Thing("ball", pale, vec(1.45, 2.02, 1.5), 0.52, mirror=0.05),
        ball(-1.25, 0.9, 1.0, wood, shine=0.35),
        ball(0.28, -0.1, 0.66, plain(0.9, 0.9, 0.92), mirror=0.85, shine=1.0),
        ball(-0.75, -1.05, 0.4, plain(0.62, 0.02, 0.025), mirror=0.06, shine=0.9),
        ball(1.35, -0.75, 0.42, plain(0.02, 0.2, 0.36), mirror=0.06, shine=0.9),
        ball(0.35, -1.55, 0.24, plain(0.75, 0.42, 0.03), mirror=0.06, shine=0.9),
    ]


def nearest(
    things: list[Thing], start: Array, way: Array
) -> tuple[Array, NDArray[np.intp]]:
    """Return how far [N] the rays get, and the number [N] of the thing they meet there."""
    distances = np.stack([thing.hit(start, way) for thing in things])
    return distances.min(0), distances.argmin(0)


def openness(things: list[Thing], points: Array, normals: Array) -> Array:
    """Return which share [N] of the sky's light the balls nearby leave to the points."""
    share = np.ones(len(points), dtype=np.float32)
    for thing in things:
        if thing.kind == "ball":
            away = thing.centre - points
            distance = np.maximum(np.linalg.norm(away, axis=-1), thing.radius)
            facing = np.maximum(dot(normals, away) / distance, 0)
            share *= 1 - 0.85 * facing * (thing.radius / distance) ** 2
    return share


def shade(
    things: list[Thing], thing: Thing, at: Array, way: Array, lamp: Array
) -> Array:
    """Return the light [N, 3] that points ``at`` on a thing send back, without
    reflections."""
    out = thing.normals(at)
    to_lamp = unit(lamp - at)
    blocked = nearest(things, at + out * np.float32(2e-3), to_lamp)[0] < 30
    direct = np.maximum(dot(out, to_lamp), 0) * ~blocked
    around = (0.26 + 0.14 * out[:, 1]) * openness(things, at, out)
    light = direct[:, None] * vec(1.15, 1.05, 0.9) + around[:, None] * vec(
        0.85, 0.95, 1.15
    )
    glint = np.maximum(dot(out, unit(to_lamp - way)), 0) ** 90 * ~blocked * thing.shine
    return thing.texture(at) * light + glint[:, None].astype(np.float32)


def trace(
    things: list[Thing], start: Array, way: Array, lamp: Array, bounces: int
) -> Array:
    """Return the light [N, 3] that arrives along the rays, over up to ``bounces``
    reflections."""
    distance, which = nearest(things, start, way)
    result = sky(way)
    for number, thing in enumerate(things):
        seen = (which == number) & (distance < FAR)
        if seen.any():
            far, ray = distance[seen], way[seen]
            at = start[seen] + far[:, None] * ray
            colour = shade(things, thing, at, ray, lamp)
            colour = reflect(things, thing, (at, ray, colour), lamp, bounces)
            result[seen] = mix(colour, result[seen], step(8, 45, far))
    return result


def reflect(
    things: list[Thing],
    thing: Thing,
    seen: tuple[Array, Array, Array],
    lamp: Array,
    bounces: int,
) -> Array:
    """Add what a thing mirrors to its colour; ``seen`` is points, rays and colours [N,
    3]."""
    at, ray, colour = seen
    if not bounces or not thing.mirror:
        return colour
    out = thing.normals(at)
    cosine = np.clip(-dot(out, ray), 0, 1)
    share = thing.mirror + (1 - thing.mirror) * (1 - cosine) ** 5 * 0.7
    onward = unit(ray + 2 * cosine[:, None] * out)
    return mix(
        colour,
        trace(things, at + out * np.float32(2e-3), onward, lamp, bounces - 1),
        share,
    )


def spheres() -> Image.Image:
    """Ray-trace balls of stone, wood, metal and lacquer on a tiled floor (320 x 320,
    RGB)."""
    things = still_life()
    camera = Camera(vec(-0.5, 1.75, -5.6), vec(0.08, 0.92, 0), 2.5, 320, 320)

    def one_pass(way: Array, a: float, b: float) -> Array:
        lamp = vec(-4.2 + 1.6 * a, 6.5, -4.5 + 1.6 * b)
        start = np.broadcast_to(camera.eye, way.shape)
        return trace(things, start, way, lamp, bounces=2)

    return Image.fromarray(encode(camera.average(one_pass, 3)))


# ---------------------------------------------------------------------------------------------
# Mountains by a lake


LAND = Noise(21, 2)
SUN = unit(vec(-0.75, 0.5, -0.25))


def ground(at: Array, levels: int = 9) -> Array:
    """Return the height [...] of the land at places (x, z) [..., 2]; the lake lies at
    0."""
    x, z = at[..., 0], at[..., 1]
    peaks = LAND.ridges(at * np.float32(0.03) + vec(31.3, 12.1), levels)
    hills = LAND.fractal(at * np.float32(0.11) + vec(3.7, 8.2), levels) - 0.42
    shore = 0.10 * np.maximum(np.abs(x + 1.0 - 0.06 * z) - 5.5, -3.0)
    back = step(24, 62, z)
    near = 1.1 * step(9.5, 4.5, z + 0.25 * x)
    return (
        shore + near + hills * (2.2 + 3 * back) + back * (18 * peaks**1.5 - 1.4) - 0.25
    )


def firs(at: Array, land: Array) -> Array:
    """Return the height [...] of trees above the ground: one cone or none in each small
    cell."""
    size = np.float32(0.62)
    cell = np.floor(at / size)
    chance = LAND(cell * np.float32(7.31) + np.float32(0.5))
    spot = LAND(cell * np.float32(3.77) + np.float32(0.5)) * 0.3 + 0.35
    away = np.linalg.norm(at / size - cell - spot[..., None], axis=-1)
    woods = step(0.42, 0.6, LAND.fractal(at * np.float32(0.16) + np.float32(40), 3))
    grows = (chance < woods) & (land > 0.25) & (land < 4.2) & (at[..., 1] > 11)
    return np.where(grows, np.maximum(0.55 + 0.9 * chance - 4.2 * away, 0), 0).astype(
        np.float32
    )


def surface(at: Array, levels: int = 9) -> Array:
    """Return the height [...] of whatever is on top: ground, trees or water."""
    land = ground(at, levels)
    return np.asarray(np.maximum(land + firs(at, land), 0), dtype=np.float32)


@dataclass(frozen=True)
class View:
    """How the landscape is seen: level, towards growing z, from above x = z = 0."""

    wide: int  # pixels
    high: int  # pixels
    eye: float = 2.3  # height above the lake
    focus: float = 1.15  # focal length in image widths
    horizon: float = 0.56  # share of the image above it

    def sideways(self) -> Array:
        """Return x / z of every column [wide]."""
        columns = np.arange(self.wide, dtype=np.float32) + np.float32(0.5)
        return np.asarray((columns / self.wide - 0.5) / self.focus, dtype=np.float32)

    def rise(self) -> Array:
        """Return y / z of every row [high], top to bottom."""
        rows = np.arange(self.high, dtype=np.float32) + np.float32(0.5)
        return (self.horizon * self.high - rows) / np.float32(self.focus * self.wide)

    def depths(self, count: int) -> Array:
        """Return for every pixel [high, wide] the z of the land seen there, ``FAR`` for
        sky."""
        z = np.geomspace(2.5, 130, count, dtype=np.float32)
        x = z[:, None] * self.sideways()
        places = np.stack([x, np.broadcast_to(z[:, None], x.shape)], -1)
        slopes = (surface(places, 7) - np.float32(self.eye)) / z[:, None]
        # The land hides all lower land behind it, so the highest slope so far only
        # grows, and the first place that reaches a pixel's slope is the one seen there.
        crest = np.maximum.accumulate(slopes, axis=0)
        rows = self.rise()
        seen = [np.interp(rows, crest[:, i], z, right=FAR) for i in range(self.wide)]
        return np.stack(seen, 1).astype(np.float32)


def sunlit(at: Array, height: Array) -> Array:
    """Return how much sun [N] reaches the places, 0 behind mountains, 1 in the open."""
    light = np.ones(len(at), dtype=np.float32)
    for distance in np.geomspace(0.25, 16, 10, dtype=np.float32):
        over = surface(at + distance * SUN[::2], 4) - (height + distance * SUN[1])
        light = np.minimum(light, 1 - step(-0.02 * distance, 0.08 * distance, over))
    return light


def paint_land(at: Array) -> Array:
    """Return the colours [N, 3] of land at places [N, 2], in sun and shade, without
    haze."""
    land, eps = ground(at), np.float32(0.03)
    trees = firs(at, land)
    height = land + trees
    dx, dz = (
        (surface(at + eps * vec(*way)) - np.maximum(height, 0)) / eps
        for way in ((1, 0), (0, 1))
    )
    normal = unit(np.stack([-dx, np.ones_like(dx), -dz], -1))
    grain = LAND.fractal(at * np.float32(3), 5)
    grass = mix(vec(0.08, 0.16, 0.03), vec(0.30, 0.29, 0.07), grain)
    rock = mix(vec(0.085, 0.095, 0.08), vec(0.25, 0.27, 0.225), grain)
    colour = mix(
        grass, rock, step(0.86, 0.7, normal[:, 1]) + step(3.5, 6, height + 2 * grain)
    )
    colour = mix(
        colour,
        vec(0.85, 0.88, 0.93),
        step(6.8, 7.6, height + 2.6 * normal[:, 1] + grain),
    )
    colour = mix(colour, vec(0.30, 0.26, 0.19), step(0.28, 0.12, land))  # the beach
    colour = mix(colour, vec(0.025, 0.055, 0.02), step(0.0, 0.08, trees))
    sun = np.maximum(dot(normal, SUN), 0) * sunlit(at, height + 0.02)
    shine = sun[:, None] * vec(1.9, 1.65, 1.25) + vec(0.22, 0.30, 0.45) * normal[:, 1:2]
    return np.asarray(colour * shine, dtype=np.float32)


def paint_water(scene: Array, depth: Array, view: View) -> Array:
    """Return the scene [H, W, 3] with its lake showing the upside-down world, in
    ripples."""
    rows, columns = np.nonzero(depth < FAR)
    z = depth[rows, columns]
    at = np.stack([z * view.sideways()[columns], z], -1)
    wet = ground(at) < 0
    rows, columns, z, at = rows[wet], columns[wet], z[wet], at[wet]
    waves = LAND.fractal(at * vec(1.2, 5), 4) - 0.5
    sway = waves * view.high * (0.05 + 0.5 / z)
    mirrored = np.clip(
        2 * view.horizon * view.high - rows + sway, 0, view.high - 1
    ).astype(int)
    share = np.clip(0.25 + z / 22, 0, 0.8)
    result = scene.copy()
    result[rows, columns] = mix(vec(0.015, 0.05, 0.06), scene[mirrored, columns], share)
    return result


def landscape() -> Image.Image:
    """Render a lake with woods and hazy mountains behind it (480 x 320, RGB)."""
    view = View(960, 640)
    depth = view.depths(1000)
    across, up = np.broadcast_arrays(view.sideways(), view.rise()[:, None])
    way = unit(np.stack([across, up, np.ones_like(up)], -1).reshape(-1, 3))
    scene = sky(way).reshape(view.high, view.wide, 3)
    land = depth < FAR
    z = depth[land]
    haze = 1 - np.exp(-((z / 125) ** 1.6))
    colour = paint_land(np.stack([z * across[land], z], -1))
    scene[land] = mix(colour, vec(0.46, 0.58, 0.70), haze)
    return Image.fromarray(
        encode(shrink(paint_water(scene, depth, view), 2) ** 1.2 * 1.05)
    )


# ---------------------------------------------------------------------------------------------
# A marble head


def egg(at: Array, centre: Array, radii: Array) -> Array:
    """Return about how far [N] points are outside an ellipsoid (below 0: inside)."""
    off = at - centre
    near = np.linalg.norm(off / radii, axis=-1)
    steep = np.linalg.norm(off / radii**2, axis=-1)
    return np.asarray(near * (near - 1) / np.maximum(steep, 1e-6), dtype=np.float32)


def join(a: Array, b: Array, soft: float) -> Array:
    """Return the distances of two bodies grown together, with a fillet of size
    ``soft``."""
    h = np.maximum(soft - np.abs(a - b), 0) / soft
    return np.asarray(np.minimum(a, b) - h * h * (soft / 4), dtype=np.float32)


# Centre, half axes, and how softly it joins what is before it; x is mirrored.
HEAD = (
    ((0.00, 1.20, 0.16), (0.41, 0.56, 0.47), 0.15),  # face
    ((0.00, 0.80, 0.40), (0.17, 0.13, 0.17), 0.22),  # chin
    ((0.24, 1.10, 0.38), (0.16, 0.15, 0.16), 0.16),  # cheek
    ((0.17, 1.485, 0.525), (0.19, 0.045, 0.08), 0.16),  # brow
    ((0.00, 0.42, -0.10), (0.27, 0.75, 0.29), 0.15),  # neck
    ((0.45, -0.20, -0.12), (0.62, 0.36, 0.36), 0.25),  # shoulder
    ((0.00, -0.32, 0.02), (0.62, 0.48, 0.40), 0.25),  # chest
)
DETAILS = (
    ((0.18, 1.345, 0.50), (0.105, 0.075, 0.085), 0.03),  # eyeball
    ((0.00, 1.36, 0.60), (0.05, 0.22, 0.10), 0.10),  # bridge of the nose
    ((0.00, 1.195, 0.70), (0.055, 0.055, 0.085), 0.08),  # tip of the nose
    ((0.055, 1.175, 0.64), (0.042, 0.036, 0.055), 0.04),  # nostril
    ((0.035, 1.00, 0.60), (0.10, 0.027, 0.055), 0.035),  # upper lip
    ((0.00, 0.945, 0.59), (0.09, 0.034, 0.06), 0.03),  # lower lip
    ((0.47, 1.26, 0.02), (0.055, 0.17, 0.11), 0.05),  # ear
)
CURLS = Noise(31)


def bust(points: Array) -> Array:
    """Return about how far [N] points are outside the marble head on its foot."""
    at = points.copy()
    at[:, 0] = np.abs(at[:, 0])
    body = egg(at, vec(0, 1.5, 0), vec(0.5, 0.58, 0.62))
    for centre, radii, soft in HEAD:
        body = join(body, egg(at, vec(*centre), vec(*radii)), soft)
    socket = egg(at, vec(0.19, 1.35, 0.67), vec(0.16, 0.09, 0.13))
    body = -join(-body, socket, 0.14)
    for centre, radii, soft in DETAILS:
        body = join(body, egg(at, vec(*centre), vec(*radii)), soft)
    hair = egg(at, vec(0, 1.55, -0.06), vec(0.56, 0.60, 0.66))
    curl = np.abs(CURLS(points * vec(6, 6, 6)) - 0.5) + 0.4 * np.abs(
        CURLS(points * 13) - 0.5
    )
    hairline = np.maximum(at[:, 2] * 0.9 - 0.55 * (at[:, 1] - 1.28) - 0.17, -0.2)
    body = join(body, np.maximum(hair - 0.10 * curl, hairline), 0.03)
    body = np.maximum(body, -0.42 - at[:, 1])  # cut off level below the shoulders
    away = np.hypot(at[:, 0], at[:, 2] + 0.1)
    waist = 0.26 + 0.5 * np.clip(np.abs(at[:, 1] + 0.66) - 0.12, 0, 0.34)
    foot = np.maximum((away - waist) * 0.8, np.abs(at[:, 1] + 1.4) - 1.05)
    return np.asarray(np.minimum(body, foot), dtype=np.float32)


def march(start: Array, way: Array, begin: float, end: float) -> tuple[Array, Mask]:
    """Walk along rays to the bust; return how far [N] they got and whether they met it
    [N]."""
    far = np.full(len(way), begin, dtype=np.float32)
    going, met = np.arange(len(way)), np.zeros(len(way), dtype=bool)
    for _ in range(110):
        gap = bust(start[going] + far[going, None] * way[going])
        met[going[gap < 2e-3]] = True
        far[going] += np.maximum(gap * 0.85, 2e-3)
        going = going[(gap >= 2e-3) & (far[going] < end)]
        if not len(going):
            break
    return far, met


def bust_normals(at: Array) -> Array:
    """Return the directions [N, 3] straight out of the bust at points [N, 3] on it."""
    corners = vec(1, -1, -1), vec(-1, -1, 1), vec(-1, 1, -1), vec(1, 1, 1)
    eps = np.float32(3e-3)
    return unit(np.sum([c * bust(at + eps * c)[:, None] for c in corners], axis=0))


def shade_bust(at: Array, way: Array, lamp: Array) -> Array:
    """Return the light [N] from points on the bust: a lamp, a weak second one, and the
    room."""
    out = bust_normals(at)
    to_lamp = unit(lamp - at)
    _, blocked = march(at + out * np.float32(0.012), to_lamp, 0.0, 2.5)
    direct = np.maximum(dot(out, to_lamp), 0) * ~blocked
    second = np.maximum(dot(out, unit(vec(0.9, 0.25, -0.35))), 0) ** 1.5
    hollow = sum(
        np.maximum(d - bust(at + np.float32(d) * out), 0) / d for d in (0.06, 0.15, 0.3)
    )
    room = (0.16 + 0.04 * out[:, 1]) * np.clip(1 - 0.33 * hollow, 0, 1)
    stone = marble(vec(0.5, 0.5, 0.5), vec(0.72, 0.72, 0.72), 1.6)(at)[:, 0]
    glint = np.maximum(dot(out, unit(to_lamp - way)), 0) ** 30 * ~blocked
    light = stone * (1.05 * direct + 0.3 * second + room) + 0.10 * glint
    return np.asarray(light, dtype=np.float32)


def statue() -> Image.Image:
    """Render a marble head before a dim wall (256 x 320, 8-bit grey)."""
    camera = Camera(vec(1.75, 1.15, 4.6), vec(0.02, 0.55, 0), 2.75, 256, 320)
    rows, columns = np.mgrid[0:320, 0:256].astype(np.float32)
    plaster = Noise(32, 2).fractal(np.stack([rows, columns], -1) / 9, 6).ravel()
    glow = np.exp(-(((columns - 165) / 120) ** 2) - ((rows - 130) / 150) ** 2).ravel()
    wall = (0.02 + 0.15 * glow) * (0.7 + 0.6 * plaster)

    def one_pass(way: Array, a: float, b: float) -> Array:
        light: Array = wall.astype(np.float32)
        start = np.broadcast_to(camera.eye, way.shape)
        far, met = march(start, way, 2.5, 6.5)
        lamp = vec(-1.7 + 0.9 * a, 2.6, 3.9 + 0.9 * b)
        light[met] = shade_bust((start + far[:, None] * way)[met], way[met], lamp)
        return light[:, None]

    return Image.fromarray(encode(camera.average(one_pass, 2)[..., 0]))


# ---------------------------------------------------------------------------------------------
# A leaf, cut out


def leaf_frame(side: int) -> tuple[Array, Array]:
    """Return for [side, side] pixels the place along the leaf (0..1) and across it."""
    y, x = (np.mgrid[0:side, 0:side].astype(np.float32) + 0.5) / side
    along = ((x - 0.17) + (0.85 - y)) / 1.42 * 1.04
    across = ((x - 0.17) - (0.85 - y)) / 1.42
    bend = 0.10 * np.sin(along * 2.6) - 0.05
    return along.astype(np.float32), (across + bend).astype(np.float32)


def leaf_veins(along: Array, across: Array) -> tuple[Array, Array]:
    """Return how much [H, W] of a vein a place is, and how far the blade bulges there."""
    out = np.abs(across)
    # Side veins leave the middle at a slant and curve forward; the two sides take
    # turns.
    rank = (along - 0.62 * out - 0.9 * out**2) * 11 + 0.5 * (across > 0)
    off = np.abs(rank % 1 - 0.5) * 2  # 1 on a side vein, 0 half-way between two
    side = step(0.9, 0.98, off - 0.25 * out)
    middle = step(0.012, 0.006, out + 0.006 * along)
    net = Noise(41, 2).ridges(np.stack([along, across], -1) * np.float32(34), 2)
    bulge = 0.012 * (1 - off**4) + 0.004 * net - 0.02 * np.exp(-((out / 0.02) ** 2))
    return (
        np.maximum(middle, np.maximum(0.75 * side, 0.35 * step(0.6, 0.95, net))),
        bulge,
    )


def leaf_shape(along: Array, across: Array) -> Array:
    """Return the leaf's cover [H, W]: 1 on the blade or the stalk, 0 beside them."""
    t = np.clip(along, 0, 1)
    half = 0.30 * np.maximum(np.sin(np.pi * t**0.72), 0) ** 0.85 * (1 - 0.35 * t)
    teeth = (along * 26 - 6 * np.abs(across)) % 1
    half = np.where((along > 0) & (along < 1), half * (0.94 + 0.07 * teeth), -1)
    blade = step(-0.002, 0.002, half - np.abs(across))
    stalk = step(0.009, 0.006, np.abs(across) - 0.004 * np.abs(along)) * (along > -0.16)
    return np.maximum(blade, stalk * (along < 0.5))


def leaf_colour(along: Array, across: Array) -> Array:
    """Return the light [H, W, 3] of the leaf, lit from the upper left."""
    vein, bulge = leaf_veins(along, across)
    where = np.stack([along, across], -1)
    patches = Noise(42, 2).fractal(where * np.float32(5), 6)
    turned = step(0.38, 0.66, patches + 0.5 * np.abs(across) + 0.16 * along - 0.06)
    blade = mix(vec(0.07, 0.20, 0.02), vec(0.62, 0.33, 0.03), turned)
    blade = mix(
        blade, vec(0.45, 0.07, 0.02), step(0.72, 1.0, turned * (0.55 + patches))
    )
    colour = mix(blade, vec(0.60, 0.56, 0.22), vein * 0.65)
    down, right = np.gradient(bulge * len(bulge))
    roll = 0.9 * across  # the blade is bent along the middle
    normal = unit(
        np.stack([-right, down, np.ones_like(roll)], -1)
        + roll[..., None] * vec(1, 1, 0)
    )
    light = np.maximum(dot(normal, unit(vec(-0.5, 0.6, 0.75))), 0)
    glint = np.maximum(dot(normal, unit(vec(-0.27, 0.33, 0.95))), 0) ** 24
    lit = colour * (0.25 + 1.05 * light[..., None]) + 0.10 * glint[..., None]
    return np.asarray(lit, dtype=np.float32)


def leaf() -> Image.Image:
    """Draw an autumn leaf with a soft shadow on nothing (280 x 280, RGB with
    transparency)."""
    side, fine = 280, 4
    along, across = leaf_frame(side * fine)
    cover = leaf_shape(along, across)[..., None]
    small = shrink(cover, fine)
    # Colours must be averaged by their cover, or the empty surroundings would darken
    # the edge.
    colour = shrink(leaf_colour(along, across) * cover, fine) / np.maximum(small, 1e-6)
    shape = Image.fromarray(np.round(small[..., 0] * 255).astype(np.uint8))
    soft = shape.transform(shape.size, Image.Transform.AFFINE, (1, 0, -7, 0, 1, -9))
    shadow = (
        np.asarray(soft.filter(ImageFilter.GaussianBlur(6)), dtype=np.float32)
        / 255
        * 0.5
    )
    opaque = small[..., 0]
    alpha = opaque + shadow * (1 - opaque)
    shown = colour * (opaque / np.maximum(alpha, 1e-6))[..., None]
    pixels = np.concatenate(
        [encode(shown), np.round(alpha * 255)[..., None].astype(np.uint8)], -1
    )
    return Image.fromarray(pixels * (pixels[..., 3:] > 0).astype(np.uint8))


# ---------------------------------------------------------------------------------------------
# Craters from above


def crater(distance: Array) -> Array:
    """Return the height [...] of a crater of radius 1 and rim height about 0.25: bowl
    and rim."""
    bowl = np.maximum(1.15 * distance**2.4 - 0.9, -0.75)
    wall = 0.25 * np.exp(-np.maximum(distance - 1, 0) * 3.2)
    return np.asarray(
        np.where(distance < 1, np.minimum(bowl, 0.25), wall), dtype=np.float32
    )


def moon_heights(side: int) -> Array:
    """Return the heights [side, side] of a stretch of moon, in units of its side."""
    rng = np.random.default_rng(51)
    y, x = np.mgrid[0:side, 0:side].astype(np.float32) / side
    place = np.stack([x, y], -1)
    noise = Noise(52, 2)
    rough = (noise.fractal(place * 18, 3) - 0.5) * np.float32(0.25)
    height = 0.05 * noise.fractal(place * 3 + 5, 4) + 0.020 * noise.fractal(
        place * 16 + 9, 6
    )
    sizes = np.sort(np.minimum(0.007 * rng.random(230) ** -0.6, 0.08))[::-1]
    spots = [(0.42, 0.45, 0.235, 0.28)]
    spots += [(*rng.random(2), size, rng.uniform(0.2, 0.34)) for size in sizes]
    for cx, cy, size, depth in spots:
        distance = np.hypot(x - cx, y - cy) / size * (1 + 0.5 * rough)
        height += np.float32(depth * size) * (crater(distance) * step(4, 2, distance))
    peak = np.hypot(x - 0.43, y - 0.45) * (1 + rough)
    return np.asarray(height + 0.03 * np.exp(-((peak / 0.03) ** 2)), dtype=np.float32)


def moon_light(height: Array, slope: float) -> Array:
    """Return the light [H, W] of a sun to the left that climbs ``slope`` per unit of
    length."""
    side = len(height)
    down, right = np.gradient(height * side)
    lit = (slope + right) / np.sqrt((1 + right**2 + down**2) * (1 + slope**2))
    # Seen along the sunlight, ground is in shadow if anything before it stands higher.
    rays = height + np.arange(side, dtype=np.float32) / side * np.float32(slope)
    shadow = np.maximum.accumulate(rays, axis=1) > rays + 0.3 / side
    return np.asarray(np.maximum(lit, 0) * ~shadow, dtype=np.float32)


def craters() -> Image.Image:
    """Render cratered ground under a low sun (256 x 256, 16-bit grey, from 0 to 65535)."""
    side, fine = 256, 2
    height = moon_heights(side * fine)
    light = np.mean(
        [moon_light(height, slope) for slope in np.linspace(0.42, 0.5, 5)], axis=0
    )
    dust = 0.75 + 0.5 * Noise(53, 2).fractal(
        np.moveaxis(np.indices((side, side)), 0, -1) / 40, 6
    )
    seen = (shrink(light[..., None], fine)[..., 0] + 0.015) * dust
    low, high = np.quantile(seen, (0.002, 0.998))
    values = np.clip((seen - low) / (high - low), 0, 1) ** (1 / 1.6)
    return Image.fromarray(np.round(values * 65535).astype(np.uint16))


# ---------------------------------------------------------------------------------------------
# Writing


SCENES: dict[str, Callable[[], Image.Image]] = {
    "spheres.jpg": spheres,
    "landscape.jpg": landscape,
    "statue-grey.png": statue,
    "leaf-alpha.png": leaf,
    "crater-16bit.png": craters,
}


def write_scenes(folder: Path) -> None:
    """Write the five pictures into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in SCENES.items():
        print(f"making {name}", file=sys.stderr)
        image = make()
        if name.endswith(".jpg"):
            image.save(folder / name, quality=90, optimize=True)
        else:
            image.save(folder / name, optimize=True)


def write_digits(folder: Path, seed: int) -> None:
    """Write two digits of each class, 28 x 28 and grey, named by number and label."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for index, label in enumerate(rng.permutation(np.repeat(np.arange(10), 2))):
        pixels = train_digits_cnn.render_digit(int(label), rng)
        image = Image.fromarray(np.round(pixels * 255).astype(np.uint8))
        image.save(folder / f"{index:02d}-{label}.png", optimize=True)


def write_pairs(folder: Path, seed: int) -> None:
    """Write nine pictures of five coloured digits, 96 x 96, named by number and by the
    digit that is there twice."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    glyphs = train_pairs_vit.draw_glyphs(300, rng)
    seen: set[int] = set()
    while len(seen) < 9:
        picture = train_pairs_vit.draw_picture(glyphs, rng)
        if picture.pair in seen:
            continue
        pair = "none" if picture.pair == train_pairs_vit.NOTHING else picture.pair
        path = folder / f"{len(seen):02d}-{pair}.png"
        Image.fromarray(picture.pixels).save(path, optimize=True)
        seen.add(picture.pair)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Make the sample images.")
    parser.add_argument(
        "--out", type=Path, default=HERE, help="folder to write the three folders to"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=2024,
        help="seed of the digits, 0 or more (default: 2024)",
    )
    options = parser.parse_args(arguments)
    write_digits(options.out / "digits", options.seed)
    write_pairs(options.out / "pairs", options.seed)
    write_scenes(options.out / "scenes")


if __name__ == "__main__":
    main()
