// The guesses of heads for a few rows, in one call: residual blocks x + SiLU(W[x; e] + b), or
// steps of one network for all heads (recurrent.h); the projection, the likeliest columns and their log-probabilities.
//
// Rows do not depend on each other, as in matmul.h. Of equal logits the lower column comes first.
#pragma once
#include <vector>

#include "draw.h"
#include "recurrent.h"

struct Head {  // mirrored in kernels.py
    const Matrix* blocks;  // its own, where it has any
    int64_t num_blocks, num_read;  // tokens of the path that the first block reads
    Matrix projection;
};

struct Heads {
    int64_t hidden, embedding;
    int64_t one_projection;            // whether all heads use the first one's
    float factor, cap;                 // of logits; a cap of 0 is none
    const Head* heads;
    Matrix embeddings;          // of the input [V, embedding]
    const int64_t* column_ids;  // [columns], or null where column numbers are token ids
    const Recurrent* recurrent;  // in place of blocks, or null
};

struct Guess {
    int64_t rows, path_length, count;
    const int64_t *head_of_row, *paths;  // [rows] rising; [rows, path_length], from the root on
    const int64_t* given_of_row;         // [rows], of `given`
    const float *given, *temperatures;   // [.., hidden]; [rows], or null where no scores are wanted
    int64_t* ids;                        // [rows, count], likeliest first
    float* scores;                       // [rows, count], log-probabilities
    // Of recurrent heads: the states that rows go on from [.., hidden], or null where the network runs
    // from the path's root on; [rows]; where the new states [rows, hidden] go, or null.
    const float* states;
    const int64_t* state_of_row;
    float* new_states;
    // How the base's tokens will be drawn [rows of `given`, num_draws], without logits; a temperature of
    // 0: not drawn. Null: no row's are.
    const Draw* draws;
    int64_t num_draws;
};

// What a call works in, kept for the caller's next one: new memory costs a page fault every 4 KB.
struct GuessRoom {
    std::vector<float> x, inputs, gated, x_t, logits;
    static GuessRoom& of_this_thread() {
        static thread_local GuessRoom room;
        return room;
    }
    static float* at_least(std::vector<float>& numbers, int64_t count) {
        if ((int64_t)numbers.size() < count) numbers.resize(count);
        return numbers.data();
    }
};

inline void unit_rms(const float* x, int64_t size, float* out) {
    double sum = 0;
    for (int64_t i = 0; i < size; ++i) sum += (double)x[i] * x[i];
    const float factor = 1.0f / std::sqrt(std::max((float)(sum / (double)size), 1e-12f));
    for (int64_t i = 0; i < size; ++i) out[i] = x[i] * factor;
}

class Guessing {
    static constexpr int64_t AMONG = 8;  // as in heads/draws.py

  public:
    Guessing(const Heads& h, const Guess& g, Pool& p, int threads) : h(h), g(g), p(p), rows((int)g.rows) {
        for (int row = 0; row < rows; ++row)
            if (row == 0 || g.head_of_row[row] != g.head_of_row[row - 1]) starts.push_back(row);
        starts.push_back(rows);
        int64_t widest = std::max(h.hidden, h.recurrent ? Recurrence::widest(*h.recurrent) : 0);
        for (size_t i = 0; i + 1 < starts.size() && !h.recurrent; ++i)
            widest = std::max(widest, head_at(starts[i]).blocks[0].inputs);
        GuessRoom& room = GuessRoom::of_this_thread();
        x = room.at_least(room.x, rows * h.hidden);
        for (int row = 0; row < rows; ++row) {
            const float* from = g.states ? g.states + g.state_of_row[row] * h.hidden : given(row);
            std::copy(from, from + h.hidden, x + row * h.hidden);
        }
        inputs = room.at_least(room.inputs, rows * widest);
        x_t = room.at_least(room.x_t, room_for(rows, widest));
        if (h.recurrent) gated = room.at_least(room.gated, rows * h.recurrent->mlp);
        apart = padded(columns(), LANES);
        if (keeps_logits()) logits = room.at_least(room.logits, rows * apart);
        best.assign(threads, Best(rows, (int)g.count));
    }

    void all(int id) {
        if (h.recurrent) recur(id);
        else for (size_t i = 0; i + 1 < starts.size(); ++i) transform(starts[i], starts[i + 1], id);
        if (h.one_projection) project(0, rows, id);
        else for (size_t i = 0; i + 1 < starts.size(); ++i) project(starts[i], starts[i + 1], id);
        for (int row = id; row < rows; row += p.active()) finish(row);
    }

  private:
    const Heads& h;
    const Guess& g;
    Pool& p;
    const int rows;
    std::vector<int> starts;  // the first row of each head, then `rows`
    float *x, *inputs, *x_t, *gated = nullptr, *logits = nullptr;
    int64_t apart;           // of rows of logits
    std::vector<Best> best;  // of each thread

    const float* given(int row) const { return g.given + g.given_of_row[row] * h.hidden; }

    const Head& head_at(int row) const { return h.heads[g.head_of_row[row]]; }
    bool keeps_logits() const { return g.temperatures || g.draws; }
    int64_t columns() const { return head_at(0).projection.outputs; }

    void embed(int row, int64_t place, float* to) const {
        const int64_t token = std::max<int64_t>(g.paths[row * g.path_length + place], 0);
        expand_row(h.embeddings, token, 1.0f, to);
        unit_rms(to, h.embedding, to);
    }

    // One step for each token that the rows' states have not read; rows are in the order of their heads,
    // so the rows of a step are the last ones.
    void recur(int id) {
        const Recurrence network(*h.recurrent, h.hidden, gated, x_t, p);
        const int64_t width = h.recurrent->input.inputs, last = g.head_of_row[rows - 1];
        for (int64_t step = g.states ? last : 0; step <= last; ++step) {
            const int first = (int)(std::lower_bound(g.head_of_row, g.head_of_row + rows, step) - g.head_of_row);
            for (int row = first + id; row < rows; row += p.active()) {
                float* at = inputs + (row - first) * width;
                network.unit(x + row * h.hidden, at);
                embed(row, step, at + h.hidden);
            }
            p.barrier(id);
            network.step(x + first * h.hidden, inputs, rows - first, id);
        }
        for (int row = id; row < rows; row += p.active()) {
            float* own = x + row * h.hidden;
            if (g.new_states) std::copy(own, own + h.hidden, g.new_states + row * h.hidden);
            network.output(given(row), g.head_of_row[row], own);
        }
        p.barrier(id);
    }

    void transform(int from, int to, int id) {
        const Head& head = head_at(from);
        const int64_t width = head.blocks[0].inputs;
        float* read = inputs;
        for (int row = from + id; row < to; row += p.active()) {
            float* at = read + (row - from) * width;
            std::copy(given(row), given(row) + h.hidden, at);
            for (int64_t j = 0; j < head.num_read; ++j) embed(row, j, at + h.hidden + j * h.embedding);
        }
        p.barrier(id);
        for (int64_t b = 0; b < head.num_blocks; ++b)
            block(head.blocks[b], b == 0 ? read : x + from * h.hidden, from, to - from, id);
    }

    void block(const Matrix& m, const float* read, int from, int count, int id) {
        multiply_together(m, read, count, x_t, id, p, [&](int64_t panel, int V, const float* tile) {
            const int64_t first = panel * LANES, end = std::min<int64_t>(first + V * LANES, h.hidden);
            for (int row = 0; row < count; ++row) {
                float gate[2 * LANES];
                for (int64_t o = first; o < end; o += LANES) {
                    const float* sum = tile + row * V * LANES + (o - first);
                    const int64_t n = std::min<int64_t>(LANES, end - o);
                    for (int64_t i = 0; i < LANES; ++i) gate[i] = i < n ? sum[i] + (m.bias ? m.bias[o + i] : 0.0f) : 0.0f;
                    const Vec y = load(gate);
                    store(gate, y / (splat(1.0f) + vexp(splat(0.0f) - y)));
                    float* to = x + (from + row) * h.hidden + o;
                    for (int64_t i = 0; i < n; ++i) to[i] += gate[i];
                }
            }
        });
    }

    void project(int from, int to, int id) {
        const Matrix& m = head_at(from).projection;
        Best& mine = best[id];
        multiply_together(m, x + from * h.hidden, to - from, x_t, id, p, [&](int64_t panel, int V, const float* tile) {
            const int64_t first = panel * LANES, end = std::min<int64_t>(first + V * LANES, m.outputs);
            for (int row = from; row < to; ++row) {
                float own[6 * LANES];
                float* scaled = keeps_logits() ? logits + row * apart + first : own;
                scale(m, tile + (row - from) * V * LANES, first, end, scaled);
                mine.insert_all(row, scaled, end - first, first);
            }
        });
    }

    // The family's scale and cap, after the bias.
    void scale(const Matrix& m, const float* sum, int64_t first, int64_t end, float* out) const {
        for (int64_t o = first; o < end; ++o) out[o - first] = m.bias ? sum[o - first] + m.bias[o] : sum[o - first];
        if (h.factor != 1.0f) for (int64_t o = first; o < end; ++o) out[o - first] *= h.factor;
        if (h.cap > 0) for (int64_t o = first; o < end; ++o) out[o - first] = std::tanh(out[o - first] / h.cap) * h.cap;
    }

    void finish(int row) {
        for (int other = 1; other < p.active(); ++other) best[0].join(row, best[other]);
        const Best::Found* mine = best[0].of(row);
        if (g.draws) {
            const Draw& draw = g.draws[g.given_of_row[row] * g.num_draws + g.head_of_row[row]];
            if (draw.temperature > 0) return guess_draw(row, draw);
        }
        for (int64_t i = 0; i < g.count; ++i) put(row, i, mine[i].second);
        if (g.temperatures) score(row, mine);
    }

    void put(int row, int64_t rank, int64_t column) const {
        g.ids[row * g.count + rank] = h.column_ids ? h.column_ids[column] : column;
    }

    // The row's noise is known, so the guesses are what it picks from the head's distribution. Chances, as
    // heads/draws.py has them: of a logit h at the head's temperature with the noise at its share of it. Of
    // tokens that are no candidates the noise is not known, only that it lifts none above the last one.
    void guess_draw(int row, Draw draw) const {
        static thread_local std::vector<float> memory;
        float* all = logits + row * apart;
        draw.logits = all, draw.count = columns(), draw.ids = h.column_ids;
        const int among = (int)std::max<int64_t>(g.count, std::min(AMONG, draw.count));
        Drawing drawing(draw, among, memory);
        const Best::Found* sums = drawing.highest();
        for (int64_t i = 0; i < g.count; ++i) put(row, i, sums[i].second);
        if (!g.temperatures) return;
        const float own = 1.0f / g.temperatures[row], share = draw.temperature * own;
        const float most = share * sums[0].first, least = share * sums[among - 1].first;
        for (int i = 0; i < among; ++i) all[sums[i].second] = -INFINITY;  // the others are left
        double mass = mass_of(all, [&](Vec x) { return vmin(x * splat(own), splat(least)) - splat(most); });
        for (int i = 0; i < among; ++i) mass += std::exp(share * sums[i].first - most);
        for (int64_t i = 0; i < g.count; ++i)
            g.scores[row * g.count + i] = std::min(share * sums[i].first - most - (float)std::log(mass), 0.0f);
    }

    // Of a row's logits.
    template <class Exponent> double mass_of(float* all, Exponent exponent) const {
        std::fill(all + columns(), all + apart, -INFINITY);
        return sum_of_exponentials(all, apart, exponent);
    }

    void score(int row, const Best::Found* mine) {
        const float most = mine[0].first;
        const Vec scale = splat(1.0f / g.temperatures[row]);
        const double sum = mass_of(logits + row * apart, [&](Vec x) { return (x - splat(most)) * scale; });
        const float whole = (float)std::log(sum);
        for (int64_t i = 0; i < g.count; ++i)
            g.scores[row * g.count + i] = std::min((mine[i].first - most) * (1.0f / g.temperatures[row]) - whole, 0.0f);
    }
};
