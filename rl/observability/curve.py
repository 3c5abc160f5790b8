"""curve.png: the mean reward of each step and the held-out accuracy with its standard error."""

from collections.abc import Mapping
from pathlib import Path


def draw_curve(
    path: Path, title: str, rewards: Mapping[int, float], accuracies: Mapping[int, tuple[float, float]]
) -> Path:
    """By step. Returns the path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=130)
    if rewards:
        axes.plot(*zip(*rewards.items(), strict=True), color="#9db4c8", label="training reward")
    if accuracies:
        values, errors = zip(*accuracies.values(), strict=True)
        style = {"color": "#c0392b", "marker": "o", "capsize": 3}
        axes.errorbar(list(accuracies), values, errors, label="held-out accuracy", **style)
    axes.set(xlabel="step", ylabel="reward, accuracy", title=title)
    bottom, top = axes.get_ylim()
    axes.set_ylim(min(bottom, -0.02), max(top, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return path
