"""Each panel of each dashboard shows data of a real Prometheus that reads a running Tidegate under load."""

import asyncio
import json
import pathlib
import time

import aiohttp
import dashboards
import demonstration
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
needs_prometheus = pytest.mark.skipif(
    demonstration.PROGRAM is None, reason="no Prometheus here; install Debian's package prometheus"
)
PATIENCE_S = 150.0


def queries() -> dict[str, str]:
    """What each panel and each annotation asks, by its place."""
    found = {}
    for board in dashboards.ALL:
        for panel in board.panels:
            for number, query in enumerate(panel.queries):
                found[f"{board.title}: {panel.title} [{number}]"] = query.expr
        for annotation in board.annotations:
            found[f"{board.title}: {annotation.name}"] = annotation.expr.replace("offset 1m", "offset 5s")
    return found


@needs_prometheus
@pytest.mark.timeout(300)
async def test_every_panel_and_every_annotation_has_data(tmp_path: pathlib.Path) -> None:
    empty, errors = queries(), {}
    until_s = time.monotonic() + PATIENCE_S
    async with demonstration.running(tmp_path, load_s=PATIENCE_S, scrape_s=1) as prometheus:
        while empty and time.monotonic() < until_s:
            await asyncio.sleep(5)
            for place, expr in [*empty.items()]:
                asked = demonstration.grounded(expr, rate_s=5)
                try:
                    if await prometheus.series(asked, until_at_s=time.time(), last_s=PATIENCE_S, step_s=1):
                        del empty[place]
                except (ValueError, aiohttp.ClientError) as error:
                    errors[place] = str(error)
    assert (empty, errors) == ({}, {})


@pytest.mark.parametrize("board", dashboards.ALL, ids=lambda board: board.uid)
def test_a_dashboard_is_json_whose_panels_fill_the_grid_without_overlap(board: dashboards.Dashboard) -> None:
    document = json.loads((ROOT / "helm" / "tidegate" / "files" / f"{board.uid}.json").read_text())
    taken: set[tuple[int, int]] = set()
    for panel in document["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells
    numbers = [panel["id"] for panel in document["panels"]]
    assert len(set(numbers)) == len(numbers)
    assert all(panel["description"] for panel in document["panels"] if panel["type"] != "row")
