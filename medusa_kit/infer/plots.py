"""Pictures that say more than a table. Needs matplotlib (extra `plot`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from medusa_kit.files import atomic_write


def plot_trees(rows: Sequence[Any], chosen: Any, path: Path) -> None:
    """Acceptance length, step time and predicted speed-up over the number of nodes, as a PNG.

    Dynamic trees show as paler lines.
    """
    dynamic = [row for row in rows if row.dynamic]
    rows = [row for row in rows if not row.dynamic]
    sizes = [row.num_nodes for row in rows]
    one_node = rows[0].step_seconds
    figure, axes = plt.subplots(figsize=(7, 4.2), constrained_layout=True)
    axes.plot(sizes, [row.acceptance_length for row in rows], "o-", label="acceptance length")
    axes.plot(sizes, [row.step_seconds / one_node for row in rows], "s--",
              label="step time, in one-node steps")  # fmt: skip
    axes.plot(sizes, [row.speed_up for row in rows], "^-", label="predicted speed-up")
    if dynamic:
        sizes_too = [row.num_nodes for row in dynamic]
        axes.plot(sizes_too, [row.acceptance_length for row in dynamic], "o-", color="C0",
                  alpha=0.4, label="acceptance length, dynamic")  # fmt: skip
        axes.plot(sizes_too, [row.speed_up for row in dynamic], "^-", color="C2", alpha=0.4,
                  label="predicted speed-up, dynamic")  # fmt: skip
    axes.axvline(chosen.num_nodes, color="grey", linewidth=1, linestyle=":")
    axes.annotate(f"chosen: {chosen.num_nodes} nodes", (chosen.num_nodes, axes.get_ylim()[0]),
                  xytext=(4, 6), textcoords="offset points", color="grey")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel("nodes verified a step, root included")
    axes.set_title("Longest is not fastest")
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path)


def plot_bench(names: Sequence[str], rates: Sequence[float], title: str, path: Path) -> None:
    """Tokens a second for each way of decoding, as horizontal bars in a PNG."""
    figure, axes = plt.subplots(figsize=(7, 0.6 * len(names) + 1.4), constrained_layout=True)
    bars = axes.barh(list(names), list(rates), color=["#8a8a8a"] + ["#2b7bba"] * (len(names) - 1))
    axes.bar_label(bars, labels=[f"{r:.1f} ({r / rates[0]:.2f} ×)" for r in rates], padding=3)
    axes.invert_yaxis()
    axes.set_xlim(0, max(rates) * 1.25)
    axes.set_xlabel("tokens a second")
    axes.set_title(title)
    save_figure(figure, path)


def save_figure(figure: Any, path: Path) -> None:
    with atomic_write(Path(path)) as temporary:
        figure.savefig(temporary, dpi=130, format="png")
    plt.close(figure)
