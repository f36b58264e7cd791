"""Draw roles.png, the four roles of a parameter: who stores it, and what travels.

Run it with: python docs/pictures/roles.py
"""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

INK, QUIET, LINE, PAPER = "#1b2733", "#5d6b78", "#c9d2da", "#ffffff"
BLUE, GREEN, ORANGE, GREY = "#2f6fb0", "#2e8b57", "#c8741f", "#7d8b97"
EMPTY = "#eef2f5"
NUM_KEYS, HELD = 10, (2, 5, 6)  # rows of the keyed table, and those of this client
LEFT, RIGHT, WIDTH, HEIGHT = 2.75, 8.05, 2.1, 0.46  # the server's blocks, the client's blocks, their size
ROWS = {  # role -> (y, colour, what it is)
    "shared": (3.55, BLUE, "everybody trains it"),
    "keyed": (2.55, GREEN, "a client trains its rows"),
    "local": (1.55, ORANGE, "each client has its own"),
    "frozen": (0.55, GREY, "nobody trains it"),
}


def box(axes: Axes, x: float, y: float, width: float, height: float, color: str, **style) -> None:
    shape = f"round,pad=0,rounding_size={style.pop('rounding', 0.06)}"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=shape, facecolor=color, **style))


def cells(axes: Axes, x: float, y: float, filled: tuple[int, ...], there: tuple[int, ...]) -> None:
    """A table cut into rows: those of the client in colour, the others pale, the missing ones left out."""
    step = WIDTH / NUM_KEYS
    for key in there:
        color = GREEN if key in filled else "#bfe0cd"
        box(axes, x + key * step + 0.015, y, step - 0.03, HEIGHT, color, rounding=0.03, linewidth=0)


def arrow(axes: Axes, y: float, color: str, down: bool, text: str) -> None:
    ends = ((LEFT + WIDTH + 0.25, y), (RIGHT - 0.25, y))
    start, end = ends if down else ends[::-1]
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=13, color=color, linewidth=1.6)
    )
    axes.text((LEFT + WIDTH + RIGHT) / 2, y + 0.055, text, ha="center", va="bottom", fontsize=9.5, color=INK)


def block(axes: Axes, x: float, role: str) -> None:
    y, color, _ = ROWS[role]
    if role == "keyed":
        cells(axes, x, y, HELD, tuple(range(NUM_KEYS)) if x == LEFT else HELD)
    elif role == "local" and x == LEFT:
        box(axes, x, y, WIDTH, HEIGHT, PAPER, linewidth=1.1, edgecolor=LINE, linestyle=(0, (4, 3)))
        axes.text(
            x + WIDTH / 2, y + HEIGHT / 2, "not here", ha="center", va="center", fontsize=9.5, color=QUIET
        )
    else:
        box(axes, x, y, WIDTH, HEIGHT, color, linewidth=0)
    if role == "local" and x == RIGHT:
        axes.text(
            x + WIDTH / 2, y + HEIGHT / 2, "never leaves", ha="center", va="center", fontsize=9.5, color=PAPER
        )


def draw() -> Figure:
    figure = Figure(figsize=(8, 3.9), dpi=200)
    figure.patch.set_alpha(0)  # rounded corners on any background
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 10.6), ylim=(-0.05, 5.12))
    axes.axis("off")
    box(axes, 0.05, 0.02, 10.5, 5.03, PAPER, rounding=0.18, linewidth=1, edgecolor=LINE)
    for x, name in ((LEFT, "server"), (RIGHT, "one client")):
        box(axes, x - 0.2, 0.3, WIDTH + 0.4, 4.4, EMPTY, rounding=0.14, linewidth=0)
        axes.text(x + WIDTH / 2, 4.36, name, ha="center", va="center", fontsize=12, weight="bold", color=INK)
    middle = (LEFT + WIDTH + RIGHT) / 2
    axes.text(middle, 4.36, "what travels in a round", ha="center", va="center", fontsize=10.5, color=QUIET)
    for role, (y, color, what) in ROWS.items():
        axes.text(0.3, y + 0.32, role, fontsize=13.5, weight="bold", color=color, va="center")
        axes.text(0.3, y + 0.03, what, fontsize=9, color=QUIET, va="center")
        block(axes, LEFT, role)
        block(axes, RIGHT, role)
    arrow(axes, 3.88, BLUE, True, "all of it")
    arrow(axes, 3.54, BLUE, False, "its update")
    arrow(axes, 2.88, GREEN, True, "the rows of the client's keys")
    arrow(axes, 2.54, GREEN, False, "the update of those rows")
    axes.text(middle, 1.78, "nothing", ha="center", va="center", fontsize=9.5, color=INK)
    arrow(axes, 0.72, GREY, True, "all of it")
    return figure


if __name__ == "__main__":
    draw().savefig(Path(__file__).with_suffix(".png"), transparent=True)
