// The network that all `recurrent` heads share, one step for each token of a path: u = W[unit(s); unit(e)] from the state s, which is the hidden state at first, then gated MLP blocks
// u + W2 (SiLU(W1 n) W3 n), n = norm(u). u is the next state, and the head's output but for its size.
#pragma once
#include "norms.h"
#include "rows.h"

struct RecurrentBlock {  // mirrored in kernels.py
    Matrix gate_up, down;  // panels of gate and up alternate
    const float* norm;
};

struct Recurrent {  // mirrored in kernels.py
    int64_t mlp, num_blocks;
    float epsilon, unit_epsilon;  // of the blocks' norms, and where there is no weight
    Matrix input;
    const RecurrentBlock* blocks;
    const float* gains;  // [heads, hidden]
};

// Steps of a few rows by all threads together. Its memory is the caller's.
class Recurrence {
  public:
    const Recurrent& r;
    const int64_t hidden;

    Recurrence(const Recurrent& r, int64_t hidden, float* gated, float* x_t, Pool& p)
        : r(r), hidden(hidden), gated(gated), x_t(x_t), p(p) {}

    static int64_t widest(const Recurrent& r) { return std::max(r.input.inputs, r.mlp); }

    void unit(const float* x, float* out) const {
        const float factor = rms_factor(x, hidden, r.unit_epsilon);
        for (int64_t i = 0; i < hidden; ++i) out[i] = x[i] * factor;
    }

    // x [rows, hidden]: the states. read [rows, inputs of `input`]: what is beside the state, written
    // by any thread before a barrier; its memory is used up.
    void step(float* x, float* read, int rows, int id) const {
        multiply_together(r.input, read, rows, x_t, id, p, Write<false>{r.input, x, rows, hidden});
        for (int64_t b = 0; b < r.num_blocks; ++b) {
            const RecurrentBlock& block = r.blocks[b];
            for (int row = id; row < rows; row += p.active()) {
                const float* from = x + row * hidden;
                scale_by(from, block.norm, rms_factor(from, hidden, r.epsilon), hidden, read + row * hidden);
            }
            p.barrier(id);
            multiply_together(block.gate_up, read, rows, x_t, id, p, [&](int64_t panel, int V, const float* tile) {
                for (int v = 0; v < V; v += 2) activate((panel + v) / 2, rows, tile + v * LANES, V);
            });
            multiply_together(block.down, gated, rows, x_t, id, p, Write<true>{block.down, x, rows, hidden});
        }
    }

    // The output of head k, in place of the state: with the size of the hidden state and the head's gain.
    void output(const float* given, int64_t k, float* x) const {
        const float size = std::sqrt((float)(sum_of_squares(given, hidden) / (double)hidden));
        const float* gain = r.gains + k * hidden;
        unit(x, x);
        for (int64_t i = 0; i < hidden; ++i) x[i] = x[i] * gain[i] * size;
    }

  private:
    float *const gated, *const x_t;
    Pool& p;

    void activate(int64_t unit, int rows, const float* tile, int V) const {
        const int64_t first = unit * LANES, count = std::min<int64_t>(LANES, r.mlp - first);
        for (int row = 0; row < rows; ++row) {
            const Vec gate = load(tile + row * V * LANES), up = load(tile + row * V * LANES + LANES);
            float result[LANES];
            store(result, gate / (splat(1.0f) + vexp(splat(0.0f) - gate)) * up);
            std::copy(result, result + count, gated + row * r.mlp + first);
        }
    }
};
