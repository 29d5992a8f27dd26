"""How many threads to compute with: where other programs keep the processor busy, one is faster
than all, since each waits for the slowest at every product."""

import time

import torch

ROWS, COLUMNS = 4096, 1024  # of a product as large as a layer's
PRODUCTS, ROUNDS = 20, 3


def settle() -> tuple[int, int]:
    """Leave torch with one thread where that is faster now, else with as many as it had; the C++
    kernels follow. Returns (threads from here on, threads before)."""
    before = torch.get_num_threads()
    if before == 1:
        return 1, 1
    seconds = {before: 0.0, 1: 0.0}
    for _ in range(ROUNDS):
        for threads in seconds:
            seconds[threads] += seconds_with(threads)
    torch.set_num_threads(min(seconds, key=lambda threads: seconds[threads]))
    return torch.get_num_threads(), before


def seconds_with(threads: int) -> float:
    """Seconds that some products of a vector with a matrix take."""
    torch.set_num_threads(threads)
    matrix, vector = (torch.ones(rows, COLUMNS, dtype=torch.float32) for rows in (ROWS, 1))
    torch.nn.functional.linear(vector, matrix)  # wakes the threads
    began = time.perf_counter()
    for _ in range(PRODUCTS):
        torch.nn.functional.linear(vector, matrix)
    return time.perf_counter() - began
