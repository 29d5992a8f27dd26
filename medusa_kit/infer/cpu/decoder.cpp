// A verify step of a Llama-like decoder in one call: nodes of B rows of the cache, each after its
// prefix. Rows may have different numbers of nodes; none is padded.
//
// All threads run the same phases and wait at a barrier after each. Masked slots add exact zeros and
// every sum has one order, so a node's results have the same bits in any tree and any batch.
#include <vector>

#include "prefix_layer.h"
#include "trees.h"

namespace {

void rms_norm(const float* x, const float* weight, int64_t size, float epsilon, float* out) {
    double sum = 0;
    for (int64_t i = 0; i < size; ++i) sum += (double)x[i] * x[i];
    const float factor = 1.0f / std::sqrt((float)(sum / (double)size) + epsilon);
    for (int64_t i = 0; i < size; ++i) out[i] = weight[i] * (x[i] * factor);
}

void rotate(float* x, const float* cos, const float* sin, int64_t size) {
    const int64_t half = size / 2;
    for (int64_t i = 0; i < half; ++i) {
        const float a = x[i], b = x[half + i];
        x[i] = a * cos[i] - b * sin[i];
        x[half + i] = b * cos[half + i] + a * sin[half + i];
    }
}

class Run {
  public:
    Run(const Decoder& d, const Step& s, Pool& p, int threads)
        : d(d), s(s), p(p), rows((int)s.nodes) {
        queries = d.query_heads * d.head_size;
        keys = d.kv_heads * d.head_size;
        const int64_t widest = std::max({d.hidden, d.mlp, queries});
        x.assign(s.embeddings, s.embeddings + rows * d.hidden);
        normed.resize(rows * d.hidden);
        branch.resize(rows * d.hidden);
        qkv.resize(rows * (queries + 2 * keys));
        attended.resize(rows * queries);
        gated.resize(rows * d.mlp);
        x_t.resize(room_for(rows, widest));
        best.assign(threads, Best(rows, (int)s.num_likeliest));
        attention.reset(new Attention(d, s, threads, qkv.data(), attended.data()));
    }

    void all(int id, PrefixLayer<Run>* prefix) {
        for (int64_t i = 0; i < d.num_layers && id < p.active(); ++i) {
            lay_keys(d.layers[i], i, id);
            attend(d.layers[i], i, id);
        }
        if (prefix && id < p.active()) prefix->all(x.data(), id);
        if (id < p.active()) logits(id);
    }

  private:
    friend PrefixLayer<Run>;
    const Decoder& d;
    const Step& s;
    Pool& p;
    const int rows;
    int64_t queries, keys;
    std::vector<float> x, normed, branch, qkv, attended, gated, x_t;
    std::vector<Best> best;  // of each thread
    std::unique_ptr<Attention> attention;

    // Queries, and keys and values, which go to the cache.
    void lay_keys(const Layer& l, int64_t index, int id) {
        norm_rows(x.data(), l.input_norm, normed.data(), id);
        const int64_t wide = queries + 2 * keys;
        multiply_by(l.qkv, normed.data(), rows, id, Write<false>{l.qkv, qkv.data(), rows, wide});
        if (l.values.outputs)
            multiply_by(l.values, normed.data(), rows, id, Write<false>{l.values, qkv.data() + queries + keys, rows, wide});
        place(l, index, id);
    }

    void attend(const Layer& l, int64_t index, int id) {
        attention->attend(index, l.window, id, p);
        add_branch(l.out, attended.data(), l.after_attention_norm, id);
        norm_rows(x.data(), l.before_mlp_norm, normed.data(), id);
        multiply_by(l.gate_up, normed.data(), rows, id, [&](int64_t panel, int V, const float* tile) {
            for (int v = 0; v < V; v += 2) activate((panel + v) / 2, tile + v * LANES, V);
        });
        add_branch(l.down, gated.data(), l.after_mlp_norm, id);
        p.barrier(id, true);
    }

    // Each thread norms some rows; after the barrier all threads may read all of them.
    void norm_rows(const float* from, const float* weight, float* to, int id) {
        for (int row = id; row < rows; row += p.active())
            rms_norm(from + row * d.hidden, weight, d.hidden, d.norm_epsilon, to + row * d.hidden);
        p.barrier(id);
    }

    template <class Finish> void multiply_by(const Matrix& m, const float* from, int count, int id, Finish finish) {
        lay_out(m, from, count, x_t.data(), id, p.active());
        p.barrier(id);
        product(m, x_t.data(), count, id, p.active(), finish);
        p.barrier(id);
    }

    void add_branch(const Matrix& m, const float* from, const float* norm, int id) {
        if (!norm) return multiply_by(m, from, rows, id, Write<true>{m, x.data(), rows, m.outputs});
        multiply_by(m, from, rows, id, Write<false>{m, branch.data(), rows, m.outputs});
        norm_rows(branch.data(), norm, branch.data(), id);
        for (int row = id; row < rows; row += p.active())
            for (int64_t i = row * d.hidden; i < (row + 1) * d.hidden; ++i) x[i] += branch[i];
        p.barrier(id);
    }

    void activate(int64_t unit, const float* tile, int V) {
        const int64_t first = unit * LANES, count = std::min<int64_t>(LANES, d.mlp - first);
        for (int row = 0; row < rows; ++row) {
            const Vec gate = load(tile + row * V * LANES), up = load(tile + row * V * LANES + LANES);
            const Vec one = splat(1.0f), half = splat(0.5f);
            Vec y;
            if (d.gelu) {  // the tanh form
                const Vec inner = gate + splat(0.044715f) * gate * gate * gate;
                y = half * gate * (one + vtanh(splat(0.7978845608f) * inner));
            } else {
                y = gate / (one + vexp(splat(0.0f) - gate));
            }
            float result[LANES];
            store(result, y * up);
            std::copy(result, result + count, gated.data() + row * d.mlp + first);
        }
    }

    // Norms of heads and rotary embedding; writes keys and values to the cache after the row's prefix.
    void place(const Layer& l, int64_t index, int id) {
        const int64_t table = s.rotary_length * d.rotary_size;
        const float* cos_of_all = s.rotary + l.rotary * 2 * table;
        for (int row = id; row < rows; row += p.active()) {
            float* q = qkv.data() + row * (queries + 2 * keys);
            const float* cos = cos_of_all + s.positions[row] * d.rotary_size;
            for (int64_t h = 0; h < d.query_heads + d.kv_heads; ++h) {
                float* head = q + h * d.head_size;
                const float* norm = h < d.query_heads ? l.q_norm : l.k_norm;
                if (norm) rms_norm(head, norm, d.head_size, d.norm_epsilon, head);
                rotate(head, cos, cos + table, d.rotary_size);
            }
            attention->keep(index, row);
        }
        p.barrier(id);
    }

    void logits(int id) {
        const int wanted = (int)s.num_kept;
        for (int row = id; row < wanted; row += p.active())
            rms_norm(x.data() + s.kept[row] * d.hidden, d.final_norm, d.hidden, d.norm_epsilon, s.hidden_out + row * d.hidden);
        if (!s.logits) return;
        Best& mine = best[id];
        p.barrier(id);
        const Write<false> write{d.output, s.logits, wanted, d.output.outputs};
        multiply_by(d.output, s.hidden_out, wanted, id, [&](int64_t panel, int V, const float* tile) {
            write(panel, V, tile);
            const int64_t first = panel * LANES, end = std::min<int64_t>(first + V * LANES, d.output.outputs);
            for (int row = 0; row < wanted; ++row) {
                const float* out = s.logits + row * d.output.outputs;
                for (int64_t o = first; o < end; ++o) mine.insert(row, out[o], o);
            }
        });
        for (int row = id; row < wanted; row += p.active()) {
            for (int other = 1; other < p.active(); ++other) best[0].join(row, best[other]);
            for (int i = 0; i < best[0].count; ++i) s.likeliest[row * best[0].count + i] = best[0].of(row)[i].second;
        }
    }
};

}  // namespace

#pragma GCC visibility push(default)
extern "C" {
const char* mk_isa() { return MK_ISA; }

void mk_step(const Decoder* decoder, const Step* step, int threads) {
    Pool& p = pool(threads);
    Run run(*decoder, *step, p, threads);
    std::unique_ptr<PrefixLayer<Run>> prefix;
    if (decoder->prefix) prefix.reset(new PrefixLayer<Run>(*decoder, *step, p, threads));
    p.run([&](int id) { run.all(id, prefix.get()); });
}

void mk_guess(const Heads* heads, const Guess* guess, int threads) {
    Pool& p = pool(threads);
    Guessing run(*heads, *guess, p, threads);
    p.run([&](int id) { run.all(id); });
}

void mk_fill(const Heads* heads, const Fill* fill, int threads) {
    Passes passes(*heads, fill->given, pool(threads), threads);
    Filling(*fill, passes).all();
}

void mk_grow(const Heads* heads, const Grow* grow, int threads) {
    Passes passes(*heads, grow->given, pool(threads), threads);
    Growing(*grow, passes).all();
}

// out [rows, outputs] = x [rows, inputs] W^T + bias, at most MAX_ROWS rows
void mk_linear(const Matrix* matrix, const float* x, int rows, float* out, int threads) {
    Pool& p = pool(threads);
    static thread_local std::vector<float> x_t;
    x_t.resize(room_for(rows, matrix->inputs));
    lay_out(*matrix, x, rows, x_t.data(), 0, 1);
    float* transposed = x_t.data();
    p.run([&](int id) { product(*matrix, transposed, rows, id, p.active(), Write<false>{*matrix, out, rows, matrix->outputs}); });
}

// out [count, inputs] = the rows `ids` of the weights, times a factor. Returns how many were expanded:
// fewer than `count` where the next one is not a row of the matrix.
int64_t mk_rows(const Matrix* matrix, const int64_t* ids, int64_t count, float factor, float* out) {
    for (int64_t i = 0; i < count; ++i) {
        if (ids[i] < 0 || ids[i] >= matrix->outputs) return i;
        expand_row(*matrix, ids[i], factor, out + i * matrix->inputs);
    }
    return count;
}
}
#pragma GCC visibility pop
