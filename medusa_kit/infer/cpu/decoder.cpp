// A verify step of a Llama-like decoder in one call: nodes of B rows of the cache, each after its
// prefix. Rows may have different numbers of nodes; none is padded.
//
// All threads run the same phases and wait at a barrier after each. Masked slots add exact zeros and
// every sum has one order, so a node's results have the same bits in any tree and any batch.
#include <vector>

#include "heads.h"

struct Layer {  // mirrored in kernels.py; a norm's weight is null where the family has none
    Matrix qkv, out, gate_up, down;
    Matrix values;  // where they have a form of their own and qkv is queries and keys; else of no outputs
    const float *input_norm, *after_attention_norm, *before_mlp_norm, *after_mlp_norm, *q_norm, *k_norm;
    int64_t rotary, window;  // which of the step's rotary tables; 0 for no window
};

struct Decoder {
    int64_t hidden, mlp, query_heads, kv_heads, head_size, rotary_size, num_layers, gelu;
    float norm_epsilon, scale;
    const Layer* layers;
    const float* final_norm;
    Matrix output;
};

struct Step {
    int64_t batch, nodes;             // B; nodes of all rows together, N
    int64_t cache_rows, slots;        // of the cache
    const float* embeddings;          // [N, hidden]
    const float* rotary;              // [tables][cos, sin][rotary_length][rotary_size]
    int64_t rotary_length;
    const int64_t* positions;         // [N], in that table
    const int64_t *starts, *places;   // [B + 1] each row's first node, [B] its row of the cache
    const int64_t *lengths, *depths;  // [B] tokens before the nodes, [N]
    const uint8_t* sees;              // one row after another, nodes x nodes
    float* cache;                     // [layers][keys, values][cache_rows][G][slots][E]
    int64_t num_kept;                 // nodes whose hidden states and logits are wanted
    const int64_t* kept;
    float *hidden_out, *logits;       // [kept, hidden], [kept, V]
    int64_t num_likeliest;            // how many next tokens are wanted for each kept row
    int64_t* likeliest;               // [kept, num_likeliest], likeliest first
};

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
        scratch.resize(threads);
        best.assign(threads, Best(rows, (int)s.num_likeliest));
        share_out(threads);
    }

    void all(int id) {
        for (int64_t i = 0; i < d.num_layers && id < p.active(); ++i) layer(d.layers[i], i, id);
        if (id >= p.active()) return;
        logits(id);
    }

  private:
    const Decoder& d;
    const Step& s;
    Pool& p;
    const int rows;
    int64_t queries, keys;
    std::vector<float> x, normed, branch, qkv, attended, gated, x_t;
    struct Scratch { std::vector<float> query, scores, accumulated; };
    std::vector<Scratch> scratch;
    std::vector<Best> best;  // of each thread
    struct Piece { int64_t b, g, first, last; };  // lanes of a key/value head of a row
    std::vector<Piece> pieces;
    std::vector<int64_t> row_of, sees_at;  // of each node; of each row
    std::vector<int64_t> sees_to;  // of each node: after the last node that it sees

    // Queries of one key/value head go in lanes of 16: (head of the group, node) pairs.
    void share_out(int threads) {
        const int64_t group = d.query_heads / d.kv_heads, heads = s.batch * d.kv_heads;
        const int64_t enough = (threads + heads - 1) / heads;
        int64_t at = 0;
        for (int64_t b = 0; b < s.batch; ++b) {
            const int64_t count = nodes_of(b), lanes = group * count;
            const int64_t blocks = std::max((lanes + LANES - 1) / LANES, std::min(enough, lanes));
            for (int64_t g = 0; g < d.kv_heads; ++g)
                for (int64_t i = 0; i < blocks; ++i) pieces.push_back({b, g, lanes * i / blocks, lanes * (i + 1) / blocks});
            row_of.insert(row_of.end(), count, b);
            sees_at.push_back(at);
            for (int64_t node = 0; node < count; ++node, at += count) {
                int64_t to = count;
                while (to > 0 && !s.sees[at + to - 1]) --to;
                sees_to.push_back(to);
            }
        }
    }

    int64_t nodes_of(int64_t b) const { return s.starts[b + 1] - s.starts[b]; }

    void layer(const Layer& l, int64_t index, int id) {
        norm_rows(x.data(), l.input_norm, normed.data(), id);
        const int64_t wide = queries + 2 * keys;
        multiply_by(l.qkv, normed.data(), rows, id, Write<false>{l.qkv, qkv.data(), rows, wide});
        if (l.values.outputs)
            multiply_by(l.values, normed.data(), rows, id, Write<false>{l.values, qkv.data() + queries + keys, rows, wide});
        place(l, index, id);
        attend(l, index, id);
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

    float* slot(int64_t layer, int64_t what, int64_t row, int64_t head, int64_t at) {
        const int64_t place = (layer * 2 + what) * s.cache_rows + s.places[row];
        return s.cache + ((place * d.kv_heads + head) * s.slots + at) * d.head_size;
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
            const int64_t b = row_of[row], at = s.lengths[b] + row - s.starts[b];
            for (int64_t g = 0; g < d.kv_heads; ++g) {
                const float* k = q + queries + g * d.head_size;
                std::copy(k, k + d.head_size, slot(index, 0, b, g, at));
                std::copy(k + keys, k + keys + d.head_size, slot(index, 1, b, g, at));
            }
        }
        p.barrier(id);
    }

    void attend(const Layer& l, int64_t index, int id) {
        for (size_t i = id; i < pieces.size(); i += p.active()) attend_lanes(l, index, pieces[i], scratch[id]);
        p.barrier(id);
    }

    const float* query_of(int64_t b, int64_t g, int64_t lane) const {
        const int64_t count = nodes_of(b), head = g * (d.query_heads / d.kv_heads) + lane / count;
        return qkv.data() + (s.starts[b] + lane % count) * (queries + 2 * keys) + head * d.head_size;
    }

    void attend_lanes(const Layer& l, int64_t index, const Piece& piece, Scratch& w) {
        const auto [b, g, first, last] = piece;
        const int64_t E = d.head_size, length = s.lengths[b], count = nodes_of(b);
        const int64_t from = l.window ? std::max<int64_t>(0, length - l.window + 1) : 0;
        int64_t in_sight = length;  // of any of the lanes
        w.query.assign(E * LANES, 0.0f);
        for (int64_t lane = first; lane < last; ++lane) {
            const float* query = query_of(b, g, lane);
            for (int64_t e = 0; e < E; ++e) w.query[e * LANES + lane - first] = query[e];
            in_sight = std::max(in_sight, length + sees_to[s.starts[b] + lane % count]);
        }
        w.scores.resize((in_sight - from) * LANES);
        score(slot(index, 0, b, g, 0), from, in_sight, w);
        hide(l, b, first, last, from, in_sight, w);
        Vec sum = softmax(in_sight - from, w);
        gather(slot(index, 1, b, g, 0), b, g, first, last, from, in_sight, sum, w);
    }

    // scores[slot][lane], some slots at a time: enough sums that do not wait for each other
    void score(const float* k, int64_t from, int64_t to, Scratch& w) const {
#ifdef __AVX512F__
        constexpr int SLOTS = 8;
#else
        constexpr int SLOTS = 4;
#endif
        int64_t at = from;
        for (; at + SLOTS <= to; at += SLOTS) score_slots<SLOTS>(k, at, from, w);
        for (; at < to; ++at) score_slots<1>(k, at, from, w);
    }
    template <int SLOTS> void score_slots(const float* k, int64_t at, int64_t from, Scratch& w) const {
        const int64_t E = d.head_size;
        const float *keys = k + at * E, *query = w.query.data();
        Vec sum[SLOTS];
#pragma GCC unroll 8
        for (int i = 0; i < SLOTS; ++i) sum[i] = splat(0);
        for (int64_t e = 0; e < E; ++e) {
            const Vec q = load(query + e * LANES);
#pragma GCC unroll 8
            for (int i = 0; i < SLOTS; ++i) sum[i] = fma(splat(keys[i * E + e]), q, sum[i]);
        }
#pragma GCC unroll 8
        for (int i = 0; i < SLOTS; ++i) store(w.scores.data() + (at + i - from) * LANES, sum[i] * splat(d.scale));
    }

    // Hides what a node does not see: other branches and, in a windowed layer, positions too far back.
    void hide(const Layer& l, int64_t b, int64_t first, int64_t last, int64_t from, int64_t to, Scratch& w) const {
        const int64_t length = s.lengths[b], count = nodes_of(b), others = to - length;
        const int64_t* depths = s.depths + s.starts[b];
        for (int64_t lane = first; lane < last; ++lane) {
            const int64_t node = lane % count, position = length + depths[node];
            const uint8_t* sees = s.sees + sees_at[b] + node * count;
            float* scores = w.scores.data() + lane - first;
            for (int64_t other = 0; other < others; ++other) {
                const void* hidden = std::memchr(sees + other, 0, others - other);
                if (!hidden) break;
                other = (const uint8_t*)hidden - sees;
                scores[(length + other - from) * LANES] = -INFINITY;
            }
            if (!l.window) continue;
            for (int64_t other = 0; other < others; ++other)
                if (depths[node] - depths[other] >= l.window) scores[(length + other - from) * LANES] = -INFINITY;
            for (int64_t at = from; at < std::min(length, position - l.window + 1); ++at)
                scores[(at - from) * LANES] = -INFINITY;
        }
    }

    // In place: exponentials, not yet divided by their sums, exactly 0 where hidden. Returns the sums.
    static Vec softmax(int64_t count, Scratch& w) {
        Vec most = splat(-INFINITY), sum = splat(0);
        for (int64_t i = 0; i < count; ++i) most = vmax(most, load(w.scores.data() + i * LANES));
        for (int64_t i = 0; i < count; ++i) {
            float* at = w.scores.data() + i * LANES;
            const Vec weight = keep_where_above(vexp(load(at) - most), load(at), -1e38f);
            store(at, weight);
            sum = sum + weight;
        }
        return sum;
    }

    void gather(const float* v, int64_t b, int64_t g, int64_t first, int64_t last, int64_t from, int64_t to,
                Vec sum, Scratch& w) {
        constexpr int R = 4, C = 4;  // lanes and vectors of the head at once
        const int64_t E = d.head_size;
        float sums[LANES];
        store(sums, sum);
        for (int64_t lane = first; lane < last; lane += R) {
            const int n = (int)std::min<int64_t>(R, last - lane);
            for (int64_t e = 0; e < E; e += C * LANES) {
                const int c = (int)std::min<int64_t>(C, (E - e) / LANES);
                Vec out[R][C];
                for (auto& row : out) for (auto& part : row) part = splat(0);
                if (n == R && c == C) gather_block<R, C>(v + e, from, to, lane - first, w, out);
                else gather_part(v + e, from, to, lane - first, n, c, w, out);
                for (int r = 0; r < n; ++r)
                    for (int i = 0; i < c; ++i)
                        store(attended_at(b, g, lane + r) + e + i * LANES, out[r][i] / splat(sums[lane - first + r]));
            }
        }
    }

    template <int R, int C>
    void gather_block(const float* v, int64_t from, int64_t to, int64_t lane, Scratch& w, Vec (&out)[4][4]) const {
        for (int64_t at = from; at < to; ++at) {
            const float* weight = w.scores.data() + (at - from) * LANES + lane;
            Vec value[C];
            for (int i = 0; i < C; ++i) value[i] = load(v + at * d.head_size + i * LANES);
            for (int r = 0; r < R; ++r)
                for (int i = 0; i < C; ++i) out[r][i] = fma(splat(weight[r]), value[i], out[r][i]);
        }
    }
    void gather_part(const float* v, int64_t from, int64_t to, int64_t lane, int n, int c, Scratch& w, Vec (&out)[4][4]) const {
        for (int64_t at = from; at < to; ++at) {
            const float* weight = w.scores.data() + (at - from) * LANES + lane;
            for (int r = 0; r < n; ++r)
                for (int i = 0; i < c; ++i)
                    out[r][i] = fma(splat(weight[r]), load(v + at * d.head_size + i * LANES), out[r][i]);
        }
    }

    float* attended_at(int64_t b, int64_t g, int64_t lane) {
        const int64_t count = nodes_of(b), head = g * (d.query_heads / d.kv_heads) + lane / count;
        return attended.data() + (s.starts[b] + lane % count) * queries + head * d.head_size;
    }

    void logits(int id) {
        const int wanted = (int)s.num_kept;
        for (int row = id; row < wanted; row += p.active())
            rms_norm(x.data() + s.kept[row] * d.hidden, d.final_norm, d.hidden, d.norm_epsilon, s.hidden_out + row * d.hidden);
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
    p.run([&](int id) { run.all(id); });
}

void mk_guess(const Heads* heads, const Guess* guess, int threads) {
    Pool& p = pool(threads);
    Guessing run(*heads, *guess, p, threads);
    p.run([&](int id) { run.all(id); });
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
