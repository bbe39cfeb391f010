"""Bars as an SVG file, for pages that show it as an image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_WIDTH = 860
_COLUMNS = 2
_GAP = 24
_BAR = 15
_STEP = 20
_TITLE = 26
_LABEL = 130  # of a bar's name
_VALUE = 52
_FONT = "font-family='system-ui, sans-serif'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar; `strong` ones stand out."""

    name: str
    value: float
    strong: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Bars of one scale under a title."""

    title: str
    bars: tuple[Bar, ...]


def bars_svg(title: str, panels: Sequence[Panel]) -> str:
    """A picture of all panels, two beside each other, longest bars first."""
    width = (_WIDTH - _GAP * (_COLUMNS + 1)) // _COLUMNS
    parts: list[str] = []
    top = 44
    for start in range(0, len(panels), _COLUMNS):
        row = panels[start : start + _COLUMNS]
        for column, panel in enumerate(row):
            parts += _panel(panel, _GAP + column * (width + _GAP), top, width)
        top += max(_TITLE + _STEP * len(panel.bars) for panel in row) + _GAP
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {top}' "
        f"width='{_WIDTH}' height='{top}' role='img'>"
    )
    return "\n".join(
        (
            head,
            f"<title>{escape(title)}</title>",
            "<rect width='100%' height='100%' fill='white'/>",
            _text(_GAP, 28, title, size=16, weight="bold"),
            *parts,
            "</svg>\n",
        )
    )


def _panel(panel: Panel, left: int, top: int, width: int) -> list[str]:
    parts = [_text(left, top + 16, panel.title, size=13, weight="bold")]
    longest = max((bar.value for bar in panel.bars), default=0.0) or 1.0
    for number, bar in enumerate(sorted(panel.bars, key=lambda bar: -bar.value)):
        y = top + _TITLE + number * _STEP
        length = max(1.0, (width - _LABEL - _VALUE) * bar.value / longest)
        box = f"x='{left + _LABEL}' y='{y}' width='{length:.1f}' height='{_BAR}'"
        fill = "#1f6feb" if bar.strong else "#b6bcc4"
        parts += [
            _text(left + _LABEL - 6, y + 12, bar.name, size=12, anchor="end"),
            f"<rect {box} fill='{fill}'/>",
            _text(left + _LABEL + length + 5, y + 12, f"{bar.value:,.0f}", size=12),
        ]
    return parts


def _text(
    x: float, y: float, text: str, *, size: int, weight: str = "normal", anchor: str = "start"
) -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' font-weight='{weight}' "
        f"text-anchor='{anchor}' fill='#1c2128' {_FONT}>{escape(text)}</text>"
    )
