"""`python -m docs.charts`: draws the charts whose figures have changed."""

from __future__ import annotations

from docs.charts.drawing import draw
from docs.charts.figures import charts, figures


def main() -> None:
    """Draws all charts."""
    for chart in charts():
        chart.path.write_text(draw(chart, figures(chart)))
        print(chart.path.name)


if __name__ == "__main__":
    main()
