"""Pictures of planes of cells, with the borders of the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mpi4py import MPI


@dataclass(frozen=True)
class Panel:
    """One picture of a plane of cells."""

    plane: np.ndarray
    name: str
    colors: str
    axes: tuple[int, int]  # of the grid, down and to the right
    limits: tuple[float, float]
    contours: Sequence[float] = ()
    labels: tuple[str, str] = ("x", "y")


def draw(path: Path, title: str, cart: MPI.Cartcomm, panels: Sequence[Panel]) -> None:
    """Draw panels side by side, with thin lines between the ranks. Local: on rank 0."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    # As many inches a cell in all panels, and room for the words beside them.
    rows, columns = (max(panel.plane.shape[axis] for panel in panels) for axis in (0, 1))
    inches = min(5.5 / rows, 4.5 / columns)
    widths = [panel.plane.shape[1] * inches for panel in panels]
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(sum(widths) + 1.5 * len(panels), rows * inches + 1.1),
        width_ratios=widths,
        squeeze=False,
        layout="constrained",
    )
    for axis, panel, width in zip(axes[0], panels, widths, strict=True):
        low, high = panel.limits
        image = axis.imshow(
            panel.plane,
            origin="lower",
            cmap=panel.colors,
            vmin=low,
            vmax=high,
            interpolation="nearest",
        )
        if panel.contours:
            axis.contour(panel.plane, panel.contours, colors="black", linewidths=0.4, alpha=0.6)
        for line, of_grid, cells in (
            (axis.axhline, panel.axes[0], panel.plane.shape[0]),
            (axis.axvline, panel.axes[1], panel.plane.shape[1]),
        ):
            for k in range(1, cart.dims[of_grid]):
                line(k * cells / cart.dims[of_grid] - 0.5, color="gray", linewidth=0.7)
        axis.set_title(panel.name, fontsize=10)
        axis.set_xlabel(f"{panel.labels[0]} / cells")
        axis.set_ylabel(f"{panel.labels[1]} / cells")
        figure.colorbar(image, cax=axis.inset_axes((1 + 0.1 / width, 0, 0.15 / width, 1)))
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=120, bbox_inches="tight", pad_inches=0.1)
    plt.close(figure)


def draw_planes(path: Path, title: str, cart: MPI.Cartcomm, whole: np.ndarray) -> None:
    """Draw the three planes of a box through its largest value. Local: on rank 0."""
    peak = np.unravel_index(np.argmax(whole), whole.shape)
    limits = (0.0, float(whole.max()))
    panels = []
    for across in range(3):
        down, right = (a for a in range(3) if a != across)
        plane = np.take(whole, peak[across], axis=across)
        name = f"{'zyx'[across]} = {peak[across]}"
        labels = ("zyx"[right], "zyx"[down])
        panels.append(Panel(plane, name, "inferno", (down, right), limits, labels=labels))
    draw(path, title, cart, panels)
