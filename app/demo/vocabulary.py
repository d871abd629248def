"""What the built-in model knows: attributes, the words for them, and the words it merely tolerates.

Pure Python and cheap to import: the front process uses it to tell which words of a prompt mean nothing to the model.
"""

from __future__ import annotations

import re

SHAPES = ("ball", "square", "triangle", "star", "heart")
COLORS = ("red", "green", "blue", "yellow", "purple", "orange", "pink", "cyan", "white", "black")
BACKGROUNDS = ("gray", "black", "white", "red", "green", "blue", "yellow", "purple", "orange", "pink", "cyan")
MOTIONS = ("right", "left", "up", "down", "bounce", "rotate", "grow", "shrink", "circle", "still")
SIZES = ("mid", "small", "big")
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "shape": SHAPES,
    "color": COLORS,
    "motion": MOTIONS,
    "background": BACKGROUNDS,
    "size": SIZES,
}
DIRECTIONS = {"right": (1, 0), "left": (-1, 0), "up": (0, -1), "down": (0, 1)}
"""Unit vectors (x, y) of the directed motions; y grows downwards."""

DEFAULTS = {"shape": "ball", "color": "red", "motion": "bounce", "background": "gray", "size": "mid"}
"""What a prompt that names no value gets: one fixed choice each, so that the picture stays clean."""

PALETTE: dict[str, tuple[int, int, int]] = {
    "red": (222, 38, 42),
    "green": (40, 165, 65),
    "blue": (40, 85, 225),
    "yellow": (248, 218, 48),
    "purple": (135, 55, 185),
    "orange": (245, 132, 24),
    "pink": (246, 140, 190),
    "cyan": (45, 205, 220),
    "white": (246, 246, 246),
    "black": (18, 18, 22),
    "gray": (140, 142, 148),
}

COLOR_WORDS: dict[str, tuple[str, ...]] = {
    "red": ("red", "crimson", "scarlet", "bright red"),
    "green": ("green", "emerald", "bright green", "lime"),
    "blue": ("blue", "navy", "bright blue", "azure"),
    "yellow": ("yellow", "golden", "bright yellow", "lemon"),
    "purple": ("purple", "violet", "lilac"),
    "orange": ("orange", "bright orange", "tangerine"),
    "pink": ("pink", "rose", "magenta"),
    "cyan": ("cyan", "turquoise", "aqua", "teal"),
    "white": ("white", "snowy", "ivory"),
    "black": ("black", "jet black"),
    "gray": ("gray", "grey"),
}
SHAPE_WORDS: dict[str, tuple[str, ...]] = {
    "ball": ("ball", "circle", "sphere", "disc", "dot"),
    "square": ("square", "box", "cube", "block"),
    "triangle": ("triangle", "pyramid"),
    "star": ("star",),
    "heart": ("heart", "love heart"),
}
SIZE_WORDS: dict[str, tuple[str, ...]] = {
    "mid": (),
    "small": ("small", "little", "tiny"),
    "big": ("big", "large", "huge", "giant"),
}
MOTION_WORDS: dict[str, tuple[tuple[str, str], ...]] = {
    "right": (
        ("moving to the right", "moves to the right"),
        ("moving right", "moves right"),
        ("going right", "goes right"),
        ("sliding to the right", "slides to the right"),
        ("flying right", "flies right"),
        ("traveling right", "travels right"),
        ("moving from left to right", "moves from left to right"),
        ("drifting towards the right", "drifts towards the right"),
        ("rolling to the right", "rolls to the right"),
        ("running right", "runs to the right"),
    ),
    "left": (
        ("moving to the left", "moves to the left"),
        ("moving left", "moves left"),
        ("going left", "goes left"),
        ("sliding to the left", "slides to the left"),
        ("flying left", "flies left"),
        ("traveling left", "travels left"),
        ("moving from right to left", "moves from right to left"),
        ("drifting towards the left", "drifts towards the left"),
        ("rolling to the left", "rolls to the left"),
        ("running left", "runs to the left"),
    ),
    "up": (
        ("moving up", "moves up"),
        ("rising", "rises"),
        ("going up", "goes up"),
        ("flying up", "flies up"),
        ("moving upwards", "moves upwards"),
        ("floating up", "floats up"),
        ("moving from bottom to top", "moves from bottom to top"),
        ("climbing", "climbs"),
        ("ascending", "ascends"),
    ),
    "down": (
        ("moving down", "moves down"),
        ("falling", "falls"),
        ("going down", "goes down"),
        ("falling down", "falls down"),
        ("dropping", "drops"),
        ("moving downwards", "moves downwards"),
        ("sinking", "sinks"),
        ("moving from top to bottom", "moves from top to bottom"),
        ("descending", "descends"),
    ),
    "bounce": (
        ("bouncing", "bounces"),
        ("bouncing up and down", "bounces up and down"),
        ("jumping", "jumps"),
        ("hopping", "hops"),
        ("bouncing on the floor", "bounces on the floor"),
        ("jumping up and down", "jumps up and down"),
    ),
    "rotate": (
        ("rotating", "rotates"),
        ("spinning", "spins"),
        ("turning", "turns"),
        ("rotating in place", "rotates in place"),
        ("spinning around", "spins around"),
        ("twirling", "twirls"),
    ),
    "grow": (
        ("growing", "grows"),
        ("getting bigger", "gets bigger"),
        ("expanding", "expands"),
        ("growing larger", "grows larger"),
        ("becoming larger", "becomes larger"),
        ("zooming in", "zooms in"),
        ("inflating", "inflates"),
    ),
    "shrink": (
        ("shrinking", "shrinks"),
        ("getting smaller", "gets smaller"),
        ("becoming smaller", "becomes smaller"),
        ("zooming out", "zooms out"),
        ("deflating", "deflates"),
    ),
    "circle": (
        ("moving in a circle", "moves in a circle"),
        ("orbiting", "orbits"),
        ("circling", "circles"),
        ("going in circles", "goes in circles"),
        ("moving around in a circle", "moves around in a circle"),
        ("going around", "goes around"),
    ),
    "still": (
        ("standing still", "stands still"),
        ("not moving", "does not move"),
        ("resting", "rests"),
        ("staying in place", "stays in place"),
        ("sitting still", "sits still"),
        ("static", "is static"),
    ),
}
"""(participle, finite verb) pairs."""

PREFIXES = (
    "a video of",
    "video of",
    "a clip of",
    "an animation of",
    "footage of",
    "a scene with",
    "a cartoon of",
    "show me",
    "make a video of",
    "i want to see",
)
SUFFIXES = (
    ", high quality",
    ", 4k",
    ", smooth animation",
    ", cinematic",
    ", simple shapes",
    " across the screen",
    " slowly",
    " quickly",
    ", minimal style",
    ", beautiful",
    ", flat colors",
    " smoothly",
    ", best quality",
    " forever",
    " for a while",
    " again and again",
)
GROUNDS = ("background", "backdrop", "screen", "wall")
PLACEHOLDERS = ("shape", "object", "thing", "figure")
# fmt: off
FUNCTION_WORDS = (
    "a", "an", "the", "one", "is", "are", "on", "against", "in", "front", "of", "over", "with", "and", "near", "to",
    "from", "at", "by", "it", "its", "that", "this", "some", "please", "background", "floor",
)
DISTRACTORS = (
    "cat", "dog", "person", "man", "woman", "car", "house", "tree", "city", "street", "beach", "ocean", "mountain",
    "forest", "robot", "bird", "fish", "horse", "child", "river", "rain", "snow", "sunset", "night", "day", "kitchen",
    "garden", "space", "water", "fire", "sand", "glass", "wooden", "metal", "shiny", "happy", "funny", "cute",
    "magic", "old", "new", "young", "fast", "slow", "long", "short", "realistic", "photo", "camera", "light",
    "shadow", "cloud", "sun", "moon", "flower", "grass", "road", "train", "plane", "boat", "guitar", "piano", "book",
    "chair", "table", "window", "door", "cup", "cake", "apple", "banana",
)
"""Words the model meets in training but knows nothing about, so that unknown words do not derail it."""
# fmt: on

DEFAULT_NEGATIVE = ", ".join(
    (
        *("Static", "2D cartoon", "cartoon", "2d animation", "paintings", "images"),
        *("worst quality", "low quality", "ugly", "deformed", "walking backwards"),
    )
)
"""The negative prompt that ``Kandinsky5T2VPipeline`` uses when none is given."""

NOTICE = "the built-in model knows shapes, colours and motions"

_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?")


def _known_words() -> frozenset[str]:
    phrases = [*PREFIXES, *SUFFIXES, *GROUNDS, *PLACEHOLDERS, *FUNCTION_WORDS]
    for table in (COLOR_WORDS, SHAPE_WORDS, SIZE_WORDS):
        phrases += [phrase for words in table.values() for phrase in words]
    phrases += [form for forms in MOTION_WORDS.values() for pair in forms for form in pair]
    known = {word for phrase in phrases for word in _WORD.findall(phrase.lower())}
    known |= {word + "s" for words in SHAPE_WORDS.values() for word in words}
    known |= set(MOTION_WORDS)
    return frozenset(known)


KNOWN_WORDS = _known_words()


def unknown_words(prompt: str) -> list[str]:
    """The distinct words of a prompt that mean nothing to the built-in model, lower-cased, in order of appearance."""
    words = (word for word in _WORD.findall(prompt.lower()) if word not in KNOWN_WORDS)
    return list(dict.fromkeys(words))
