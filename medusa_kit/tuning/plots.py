"""Plots of tree searches, benchmarks and training. Needs matplotlib (extra `plot`)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from medusa_kit.files import atomic_write
from medusa_kit.outputs import SOFTWARE

LONGEST_LABEL = 40  # characters


def plot_trees(rows: Sequence[Any], chosen: Any, path: Path) -> None:
    """Acceptance length, step time and predicted speed-up over the number of nodes, as a PNG.

    Dynamic trees are paler lines.
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


def _label(name: str) -> str:
    """The end of a long name, since folders usually differ there."""
    return name if len(name) <= LONGEST_LABEL else "…" + name[1 - LONGEST_LABEL :]


def plot_bench(
    rates: Mapping[str, float], depths: Mapping[str, Sequence[float]], title: str, path: Path
) -> None:
    """A PNG with tokens a second of each method as bars, compared with the first, and the share of
    steps that reached depth 1, 2, … for those that draft.
    """
    drafting = {_label(name): shares for name, shares in depths.items() if shares}
    names, values = [_label(name) for name in rates], list(rates.values())
    panels = 2 if drafting else 1
    figure, all_axes = plt.subplots(
        1, panels, figsize=(7 + 4 * (panels - 1), 0.6 * max(len(names), 4) + 1.4), squeeze=False,
        width_ratios=[7, 4][:panels], constrained_layout=True,
    )  # fmt: skip
    axes = all_axes[0, 0]
    bars = axes.barh(names, values, color=["#8a8a8a"] + ["#2b7bba"] * (len(names) - 1))
    labels = [f"{rate:.1f} ({rate / values[0]:.2f} ×)" for rate in values]
    axes.bar_label(bars, labels=labels, padding=3)
    axes.invert_yaxis()
    axes.set_xlim(0, max(values) * 1.35)
    axes.set_xlabel("tokens a second")
    if drafting:
        _plot_depths(all_axes[0, 1], drafting)
    figure.suptitle(title)
    save_figure(figure, path)


def _plot_depths(axes: Any, drafting: Mapping[str, Sequence[float]]) -> None:
    deepest = max(len(shares) for shares in drafting.values())
    for name, shares in drafting.items():
        axes.plot(range(1, len(shares) + 1), shares, "o-", label=name)
    axes.set_xticks(range(1, deepest + 1))
    axes.set_ylim(0, 1)
    axes.set_xlabel("depth")
    axes.set_ylabel("share of steps that got there")
    axes.grid(alpha=0.3)
    axes.legend()


def plot_load(
    servers: Mapping[str, Sequence[Mapping[str, Any]]], what: str, title: str, path: Path
) -> None:
    """A PNG of tokens/s, time to first token and time between tokens over the load.

    `servers`: by name, the figures of each load (medusa_kit.bench.load). `what`: the key of the
    load itself, concurrency or rate.
    """
    figure, (speed, first, between) = plt.subplots(1, 3, figsize=(13, 4.2), constrained_layout=True)
    for name, points in servers.items():
        loads = [point[what] for point in points]
        speed.plot(loads, [point["tokens_per_second"] for point in points], "o-",
                   label=_label(name))  # fmt: skip
        _plot_times(first, what, points, "first_token_seconds")
        _plot_times(between, what, points, "token_seconds")
    speed.set_title("tokens/s, all answers")
    first.set_title("first token, ms: p50, p95 dashed, up to p99")
    between.set_title("between tokens, ms: p50, p95 dashed, up to p99")
    loads = sorted({point[what] for points in servers.values() for point in points})
    for axes in (speed, first, between):
        axes.set_xlabel("requests at once" if what == "concurrency" else "requests a second")
        axes.set_xticks(loads, [f"{load:g}" for load in loads])
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
        axes.grid(alpha=0.3)
    speed.legend()
    figure.suptitle(title)
    save_figure(figure, path)


def _plot_times(axes: Any, what: str, points: Sequence[Mapping[str, Any]], name: str) -> None:
    """Loads without such times are left out; the colours go on as in the first panel."""
    known = [point for point in points if point[name] is not None]
    loads = [point[what] for point in known]
    p50, p95, p99 = ([1e3 * point[name][at] for point in known] for at in ("p50", "p95", "p99"))
    (line,) = axes.plot(loads, p50, "o-")
    axes.plot(loads, p95, "--", color=line.get_color(), linewidth=1)
    axes.fill_between(loads, p50, p99, color=line.get_color(), alpha=0.15)


def plot_acceptance(updates: Sequence[int], lengths: Sequence[float], path: Path) -> None:
    """A PNG of acceptance length against updates."""
    figure, axes = plt.subplots(figsize=(6, 3.6), constrained_layout=True)
    axes.plot(updates, lengths, "o-")
    axes.axhline(1.0, color="grey", linewidth=1, linestyle=":")
    axes.annotate("plain decoding", (updates[-1], 1.0), xytext=(0, 4), ha="right",
                  textcoords="offset points", color="grey")  # fmt: skip
    axes.set_xlabel("updates")
    axes.set_ylabel("acceptance length (tokens per step)")
    axes.grid(alpha=0.3)
    save_figure(figure, path)


def save_figure(figure: Any, path: Path) -> None:
    with atomic_write(Path(path)) as temporary:
        figure.savefig(temporary, dpi=130, format="png", metadata={"Software": SOFTWARE})
    plt.close(figure)
