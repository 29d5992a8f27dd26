// A verify step of a Llama-like decoder in one call: nodes of B rows of the cache, each after its
// prefix. Rows may have different numbers of nodes; none is padded.
//
// All threads run the same phases and wait at a barrier after each. What comes out of a phase is laid
// out for the next matrix by the thread that has computed it. Masked slots add exact zeros and every
// sum has one order, so a node's results have the same bits in any tree and any batch.
#include <vector>

#include "attention.h"
#include "trees.h"

namespace {

class Run {
  public:
    Run(const Decoder& d, const Step& s, Pool& p, int threads)
        : d(d), s(s), p(p), rows((int)s.nodes), shares(PHASES * d.num_layers + 1, threads),
          outputs_of_head(d.query_heads + 2 * d.kv_heads) {
        queries = d.query_heads * d.head_size;
        keys = d.kv_heads * d.head_size;
        x.assign(s.embeddings, s.embeddings + rows * d.hidden);
        branch.resize(rows * d.hidden);
        qkv.resize(rows * (queries + 2 * keys));
        attended.resize(rows * queries);
        gated.resize(rows * d.mlp);
        own.resize(threads);
        for (Own& one : own) {
            one.normed.resize(d.hidden);
            one.best = Best((int)s.num_kept, (int)s.num_likeliest);
            const int64_t room = room_for(std::min(rows, OWN_ROWS), d.hidden);
            one.few_rows = {std::vector<float>(room), std::vector<float>(room)};
        }
        laid = {std::vector<float>(room_for(rows, d.hidden)), std::vector<float>(room_for(rows, d.hidden))};
        branch_laid.resize(room_for(rows, std::max(d.mlp, queries)));
        attention.reset(new Attention(d, s, threads, qkv.data(), attended.data()));
    }

    void all(int id) {
        for (int64_t i = 0; i < d.num_layers && id < p.active(); ++i) {
            lay_keys(d.layers[i], i, id);
            add_branches(d.layers[i], i, id);
            watch(i, id);
        }
        if (id < p.active()) logits(id);
    }

  private:
    static constexpr int PHASES = 6;  // of a layer, that are dealt out
    static constexpr int OWN_ROWS = 4;  // that each thread norms for itself, at most
    struct Laid { std::vector<float> x, values; };  // a norm's output for a matrix, and for `Layer::values`
    struct Own {  // of each thread
        std::vector<float> normed;
        Best best{0, 0};
        Laid few_rows;
    };

    const Decoder& d;
    const Step& s;
    Pool& p;
    const int rows;
    int64_t queries, keys;
    std::vector<float> x, branch, qkv, attended, gated, branch_laid;
    std::vector<Own> own;
    Laid laid;
    Shares shares;
    std::vector<std::atomic<int64_t>> outputs_of_head;  // computed so far, in all layers
    std::unique_ptr<Attention> attention;

    // What a layer has put out. Until the next barrier `x` is only read.
    void watch(int64_t index, int id) {
        for (int64_t w = 0; w < s.num_watched && id < p.active(); ++w) {
            if (s.watched[w] != index) continue;
            for (int64_t row = id; row < rows; row += p.active())
                std::copy_n(x.data() + row * d.hidden, d.hidden, s.watched_out + (row * s.num_watched + w) * d.hidden);
        }
    }

    // Queries, and keys and values, which go to the cache.
    void lay_keys(const Layer& l, int64_t index, int id) {
        Laid& normed = norm_rows(l.input_norm, l.qkv, l.values, id);
        multiply_heads(l.qkv, normed.x.data(), 0, l, index, id);
        if (l.values.outputs) multiply_heads(l.values, normed.values.data(), d.query_heads + d.kv_heads, l, index, id);
        p.barrier(id);
    }

    // Attention and the MLP, from `x`, `qkv` and the cache alone: where not all nodes are wanted, a run of
    // those that are may begin here.
    void add_branches(const Layer& l, int64_t index, int id) {
        attend(l, index, id);
        add_branch(l.out, l.after_attention_norm, id);
        p.barrier(id);
        gate(l, norm_rows(l.before_mlp_norm, l.gate_up, Matrix(), id).x.data(), id);
        p.barrier(id);
        add_branch(l.down, l.after_mlp_norm, id);
        p.barrier(id, true);
    }

    // Norms `count` rows, the first of which is at `row_of(0)`, and lays them out for one or two
    // matrices; a few rows by each thread for itself, which takes less time than a barrier and what one
    // core reads from another.
    template <class RowOf>
    Laid& norm_rows(int count, RowOf row_of, const float* weight, float* keep, const Matrix& m, const Matrix& values, int id) {
        const bool alone = count <= OWN_ROWS;
        Laid& to = alone ? own[id].few_rows : laid;
        float* normed = own[id].normed.data();
        const int64_t pieces = padded(d.hidden, PIECE) / PIECE, all = count * pieces;
        const int64_t end = alone ? all : all * (id + 1) / p.active();
        for (int64_t at = alone ? 0 : all * id / p.active(), next; at < end; at = next) {
            const int64_t row = at / pieces, from = at % pieces * PIECE;
            next = std::min(end, (row + 1) * pieces);
            const int64_t to_input = from + (next - at) * PIECE, size = std::min(to_input, d.hidden) - from;
            const float* read = row_of((int)row);
            scale_by(read + from, weight + from, rms_factor(read, d.hidden, d.norm_epsilon), size, normed);
            lay_out_piece(m, normed, 0, count, (int)row, (int)row + 1, from, to_input, to.x.data());
            if (values.outputs) lay_out_piece(values, normed, 0, count, (int)row, (int)row + 1, from, to_input, to.values.data());
            if (keep && !(alone && id)) std::copy(normed, normed + size, keep + row * d.hidden + from);
        }
        if (!alone) p.barrier(id);
        return to;
    }

    Laid& norm_rows(const float* weight, const Matrix& m, const Matrix& values, int id) {  // of all nodes
        return norm_rows(rows, [&](int row) { return x.data() + row * d.hidden; }, weight, nullptr, m, values, id);
    }

    // `done(from, to)` follows outputs from `from` to before `to`, in the thread that has computed them;
    // both are multiples of `unit`.
    template <class Finish, class Done>
    void multiply_by(const Matrix& m, const float* x_t, int count, int64_t unit, int id, Finish finish, Done done) {
        const int64_t outputs = padded(m.outputs, 2 * LANES);
        const int64_t chunk = count == 1 ? std::max(4 * LANES / unit, (int64_t)1) : 1;
        shares.deal(id, p.active(), (outputs + unit - 1) / unit, chunk, [&](int64_t first, int64_t last) {
            const int64_t from = first * unit, to = std::min(last * unit, outputs);
            product_of_panels(m, x_t, count, from / LANES, to / LANES, AnyFinish(finish));
            done(from, std::min(to, m.outputs));
        });
    }
    template <class Finish> void multiply_by(const Matrix& m, const float* x_t, int count, int id, Finish finish) {
        multiply_by(m, x_t, count, 2 * LANES, id, finish, [](int64_t, int64_t) {});
    }

    // Queries, keys, values; `first`: the head that the matrix begins with. Whoever computes the last
    // outputs of a head places it.
    void multiply_heads(const Matrix& m, const float* x_t, int64_t first, const Layer& l, int64_t index, int id) {
        const int64_t E = d.head_size;
        const Write<false> write{m, qkv.data() + first * E, rows, queries + 2 * keys};
        multiply_by(m, x_t, rows, 2 * LANES, id, write, [&](int64_t from, int64_t to) {
            for (int64_t head = from / E; head * E < to; ++head) {
                const int64_t here = std::min(to, (head + 1) * E) - std::max(from, head * E);
                if (here == E) place(l, index, first + head);
                else if ((outputs_of_head[first + head].fetch_add(here, std::memory_order_acq_rel) + here) % E == 0)
                    place(l, index, first + head);
            }
        });
    }

    // The norm of a head and rotary embedding; writes keys and values to the cache after the row's prefix.
    void place(const Layer& l, int64_t index, int64_t head) {
        const int64_t table = s.rotary_length * d.rotary_size;
        const float* cos_of_all = s.rotary + l.rotary * 2 * table;
        const float* norm = head < d.query_heads ? l.q_norm : l.k_norm;
        for (int row = 0; row < rows; ++row) {
            float* at = qkv.data() + row * (queries + 2 * keys) + head * d.head_size;
            if (head < d.query_heads + d.kv_heads) {
                const float* cos = cos_of_all + s.positions[row] * d.rotary_size;
                if (norm) rms_norm_in_place(at, norm, d.head_size, d.norm_epsilon);
                rotate(at, cos, cos + table, d.rotary_size);
            }
            if (head >= d.query_heads) attention->keep(index, row, head - d.query_heads);
        }
    }

    void attend(const Layer& l, int64_t index, int id) {
        const int64_t E = d.head_size;
        const bool whole = E % PIECE == 0;  // a head can be laid out by itself
        attention->attend(index, l.window, id, p, shares, [&](int64_t row, int64_t end, int64_t head) {
            const float* result = attended.data() + row * queries + head * E;
            if (whole) lay_out_piece(l.out, result, queries, rows, (int)row, (int)end, head * E, (head + 1) * E, branch_laid.data());
        });
        if (whole) return;
        lay_out(l.out, attended.data(), rows, branch_laid.data(), id, p.active());
        p.barrier(id);
    }

    // Sets what the last matrix of the layer reads.
    void gate(const Layer& l, const float* x_t, int id) {
        auto finish = [&](int64_t panel, int V, const float* tile) {
            for (int v = 0; v < V; v += 2) activate((panel + v) / 2, tile + v * LANES, V);
        };
        multiply_by(l.gate_up, x_t, rows, 2 * PIECE, id, finish, [&](int64_t from, int64_t to) {
            lay_out_piece(l.down, gated.data() + from / 2, d.mlp, rows, 0, rows, from / 2, padded(to / 2, PIECE), branch_laid.data());
        });
    }

    // Adds the product of what has been laid out in `branch_laid`.
    void add_branch(const Matrix& m, const float* norm, int id) {
        if (!norm) return multiply_by(m, branch_laid.data(), rows, id, Write<true>{m, x.data(), rows, m.outputs});
        multiply_by(m, branch_laid.data(), rows, id, Write<false>{m, branch.data(), rows, m.outputs});
        p.barrier(id);
        for (int row = id; row < rows; row += p.active()) {
            float* from = branch.data() + row * d.hidden;
            rms_norm_in_place(from, norm, d.hidden, d.norm_epsilon);
            for (int64_t i = 0; i < d.hidden; ++i) x[row * d.hidden + i] += from[i];
        }
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

    void logits(int id) {
        const int wanted = (int)s.num_kept;
        auto row_kept = [&](int row) { return x.data() + s.kept[row] * d.hidden; };
        const Laid& normed = norm_rows(wanted, row_kept, d.final_norm, s.hidden_out, d.output, Matrix(), id);
        if (!s.logits) return;
        Best& mine = own[id].best;
        const Write<false> write{d.output, s.logits, wanted, d.output.outputs};
        multiply_by(d.output, normed.x.data(), wanted, id, [&](int64_t panel, int V, const float* tile) {
            write(panel, V, tile);
            const int64_t first = panel * LANES, end = std::min<int64_t>(first + V * LANES, d.output.outputs);
            for (int row = 0; row < wanted; ++row)
                mine.insert_all(row, s.logits + row * d.output.outputs + first, end - first, first);
        });
        p.barrier(id);
        Best& best = own[0].best;
        for (int row = id; row < wanted; row += p.active()) {
            for (int other = 1; other < p.active(); ++other) best.join(row, own[other].best);
            for (int i = 0; i < best.count; ++i) s.likeliest[row * best.count + i] = best.of(row)[i].second;
        }
    }
};

}  // namespace

#pragma GCC visibility push(default)
extern "C" {
const char* mk_isa() { return MK_ISA; }

// Whether products are computed by integers.h, so that `Matrix::digits` counts.
int mk_integers() {
#ifdef MK_INTEGERS
    return 1;
#else
    return 0;
#endif
}

void mk_step(const Decoder* decoder, const Step* step, int threads) {
    Pool& p = pool(threads);
    Run run(*decoder, *step, p, threads);
    p.run([&](int id) { run.all(id); }, Pool::BETWEEN_STEPS);
}

void mk_guess(const Heads* heads, const Guess* guess, int threads) {
    Pool& p = pool(threads);
    Guessing run(*heads, *guess, p, threads);
    p.run([&](int id) { run.all(id); });
}

void mk_fill(const Heads* heads, const Fill* fill, int threads) {
    Passes passes(*heads, *fill, pool(threads), threads);
    Filling(*fill, passes).all();
}

void mk_grow(const Heads* heads, const Grow* grow, int threads) {
    Passes passes(*heads, *grow, pool(threads), threads);
    Growing(*grow, passes).all();
}

// By the calling thread alone.
int64_t mk_draw(const Draw* draw) {
    static thread_local std::vector<float> scores;
    return Drawing(*draw, 1, scores).highest()->second;
}

// out [rows, outputs] = x [rows, inputs] W^T + bias, at most MAX_ROWS rows
void mk_linear(const Matrix* matrix, const float* x, int rows, float* out, int threads) {
    Pool& p = pool(threads);
    static thread_local std::vector<float> x_t;
    x_t.resize(room_for(rows, matrix->inputs));
    lay_out(*matrix, x, rows, x_t.data(), 0, 1);
    float* transposed = x_t.data();
    const Write<false> write{*matrix, out, rows, matrix->outputs};
    p.run([&](int id) { product(*matrix, transposed, rows, id, p.active(), AnyFinish(write)); });
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
