"""What the host does for a decoding step: its time where the forward takes none.

    python -m benchmarks.host_time [--against COMMIT|FOLDER] [--rows 1,8,48] [--parts]

A tiny model is loaded, and whatever would compute its forward is replaced by something that has
computed it already. All else of a step is the product's own. Two runners: `device` is a captured
forward, whose graph takes no time when it is replayed; `cpu` is the C++ runner, whose call returns
at once. Draft tokens are the heads' own, and the base model's tokens are made so that all of them
are right in one step and none in the next.

A figure is the median of many steps, in microseconds, and then of the rounds. `a row` is what one
more row adds: the slope between the fewest and the most rows. With `--against` both versions take
turns in each round, and a ratio above 1 says that the new one takes less. `--sleep` adds so many
microseconds to each step, which the figures must show. `--parts` wraps the functions of a step,
which makes it longer, and says which of them its time goes to.

On the `device`, heads and draws compute on the host here, which a device would do beside it.
"""
