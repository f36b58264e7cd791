"""Numbers and names as a page shows them. Whatever comes from a file is escaped here."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from partwise.pages.run_groups import Spread

UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
NONE = "&ndash;"


def text(value: Any) -> str:
    """Any value as text of a page, in which nothing is a command."""
    return html.escape(str(value), quote=True)


def number(value: float | None) -> str:
    """A metric: four decimals, or a power of ten if that says too little or too much."""
    if value is None or not math.isfinite(value):
        return NONE
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:,.4f}"
    return f"{value:.3e}"


def brief(value: float | None) -> str:
    """A number with three digits."""
    return NONE if value is None else f"{value:.3g}"


def whole(value: float | None) -> str:
    """A count."""
    return NONE if value is None or not math.isfinite(value) else f"{value:,.0f}"


def spread(found: Spread | None) -> str:
    """A mean over seeds with its deviation, which has a column of its own, so that numbers are aligned."""
    if found is None:
        return NONE
    small = found.deviation
    return number(found.mean) + (
        "" if small is None else f'<small class="pm">&plusmn; {deviation(small)}</small>'
    )


def deviation(value: float) -> str:
    """A deviation, as precise as the metric."""
    return f"{value:.4f}" if 5e-5 <= value < 1e4 or value == 0 else f"{value:.1e}"


def size(num_bytes: float | None) -> str:
    """Bytes in the unit that fits."""
    if num_bytes is None or not math.isfinite(num_bytes):
        return NONE
    power = min(int(math.log10(num_bytes) // 3), len(UNITS) - 1) if num_bytes >= 1 else 0
    return f"{num_bytes / 1000**power:,.{1 if power else 0}f} {UNITS[power]}"


def duration(seconds: float | None) -> str:
    """Seconds as a person says them."""
    if seconds is None or not math.isfinite(seconds):
        return NONE
    if seconds < 0.1:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 90:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours:,} h {minutes} min" if hours else f"{minutes} min"


def plain_table(
    caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "", muted: int = 0
) -> str:
    """A table in a frame that scrolls by itself. Cells are HTML; the first of a row names it; the last `muted` rows
    are quiet."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(
        f"<tr{' class=quiet' if place >= len(rows) - muted else ''}>"
        f'<th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>'
        for place, row in enumerate(rows)
    )
    return (
        f'<div class="frame {kind}" role="region" tabindex="0" aria-label="{caption}"><table>'
        f"<caption><span>{caption}</span></caption><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def definition_list(pairs: Mapping[str, str], kind: str) -> str:
    """Names with values. Values are HTML."""
    inside = "".join(f"<div><dt>{text(name)}</dt><dd>{value}</dd></div>" for name, value in pairs.items())
    return f'<dl class="{kind}">{inside}</dl>'


def swatch(place: int) -> str:
    """The line of a group, as it is in the charts."""
    return (
        f'<svg class="swatch c{place % 8} d{place % 5}" width="26" height="10" aria-hidden="true">'
        f'<line x1="1" y1="5" x2="25" y2="5"/></svg>'
    )


def section(key: str, title: str, inside: str, about: str = "", task: str = "") -> str:
    """A part of the page with a heading; empty if there is nothing in it. `task`: which of several it is about."""
    if not inside:
        return ""
    words = f'<p class="about first">{about}</p>' if about else ""
    name, of = (f"{key}-{text(task)}", f" on {text(task)}") if task else (key, "")
    heading = f'<h2 id="{name}-title">{title}{of}</h2>'
    return f'<section class="{key}" aria-labelledby="{name}-title" id="{name}">{heading}{words}{inside}</section>'


def part(key: str, inside: str) -> str:
    """Something that a live page replaces when it changes."""
    return f'<div data-part="{text(key)}">{inside}</div>'
