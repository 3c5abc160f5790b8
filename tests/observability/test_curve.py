"""What a run's picture shows, by the colours of its points."""

import numpy as np
import pytest

from rl.observability.curve import draw_curve

REWARDS, ACCURACIES = {1: 0.1, 2: 0.4, 3: 0.3}, {0: (0.2, 0.05), 3: (0.6, 0.05)}
BLUE, RED = (157, 180, 200), (192, 57, 43)


@pytest.mark.parametrize("rewards", [{}, REWARDS])
@pytest.mark.parametrize("accuracies", [{}, ACCURACIES])
def test_the_picture_shows_what_was_measured(tmp_path, rewards, accuracies):
    """A warm-up alone has no rewards; a run without evaluations no accuracy."""
    from matplotlib.image import imread

    path = draw_curve(tmp_path / "curve.png", "a run", rewards, accuracies)
    pixels = np.round(255 * imread(path)[:, :, :3])
    for colour, is_there in ((BLUE, bool(rewards)), (RED, bool(accuracies))):
        near = np.abs(pixels - colour).max(axis=2) < 12  # holds: meaning, of 255; the two are 100 apart
        assert near.any() == is_there


def test_a_better_run_goes_up(tmp_path):
    from matplotlib.image import imread

    path = draw_curve(tmp_path / "curve.png", "a run", {}, {0: (0.0, 0.0), 9: (1.0, 0.0)})
    pixels = np.round(255 * imread(path)[:, :, :3])
    rows, columns = np.nonzero(np.abs(pixels - RED).max(axis=2) < 12)  # holds: meaning, of 255
    at_the_left = columns < np.quantile(columns, 0.8)  # holds: meaning, the legend is at the right
    rows, columns = rows[at_the_left], columns[at_the_left]
    middle = np.median(columns)
    assert rows[columns > middle].mean() < rows[columns < middle].mean()  # row 0 is at the top


def test_the_picture_names_what_it_shows(tmp_path, monkeypatch):
    from matplotlib import pyplot

    close, figures = pyplot.close, []
    monkeypatch.setattr(pyplot, "close", lambda *which: (figures.extend(which), close(*which)))
    draw_curve(tmp_path / "curve.png", "a run", REWARDS, ACCURACIES)
    (axes,) = figures[-1].axes
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == ("a run", "step", "reward, accuracy")
    named = {text.get_text() for text in axes.get_legend().get_texts()}
    assert named == {"training reward", "held-out accuracy"}
    assert axes.get_ylim() == (-0.02, 1.02)  # from nothing to all, whatever was measured
