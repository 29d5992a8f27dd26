// Attention of a step's nodes over the cache.
//
// Positions of a text are cut into ranges of RANGE. A range's keys and values are read once for all
// nodes of the row and all query heads that share them, and ranges are merged in order. Slots that a
// node does not see add exact zeros. So the order of its sums depends on positions alone.
#pragma once
#include <memory>

#include "attention_parts.h"
#include "shares.h"
#include "step.h"

constexpr int64_t RANGE = 128;    // part of what a result's bits depend on
constexpr int64_t MAX_LANES = 64;  // of a unit of work

class Attention {
  public:
    // qkv [N, (H + 2G) E]: queries, keys and values of all nodes; out [N, H E].
    Attention(const Decoder& d, const Step& s, int threads, const float* qkv, float* out)
        : d(d), s(s), E(d.head_size), group(d.query_heads / d.kv_heads), width((d.query_heads + 2 * d.kv_heads) * E),
          qkv(qkv), out(out), scratch(threads) {
        int64_t at = 0;
        for (int64_t b = 0; b < s.batch; ++b) {
            rows.push_back(row_at(b, at));
            row_of_node.resize(s.starts[b + 1], b);
        }
        share_out(threads);
    }

    // Writes a key or value head of a node after its row's prefix; `head`: keys, then values.
    void keep(int64_t layer, int64_t node, int64_t head) {
        const int64_t what = head / d.kv_heads, b = row_of_node[node];
        const float* from = qkv + node * width + (d.query_heads + head) * E;
        const int64_t to = place(layer, what, b, head % d.kv_heads) + (s.lengths[b] + node - s.starts[b]) * E;
        if (!s.half_cache) std::copy(from, from + E, (float*)s.cache + to);
        else for (int64_t e = 0; e < E; ++e) ((uint16_t*)s.cache)[to + e] = to_half(from[e]);
    }

    // Calls `done(node, end, head)` for results of nodes side by side, in the thread that has computed them.
    template <class Done> void attend(int64_t layer, int64_t window, int id, Pool& p, Shares& shares, Done done) {
        shares.deal(id, p.active(), (int64_t)units.size(), 1, [&](int64_t from, int64_t to) {
            for (int64_t i = from; i < to; ++i) compute(units[i], layer, window, scratch[id], done);
        });
        p.barrier(id);
        if (!merged) return;
        merge_ranges(id, p.active(), done);
        p.barrier(id);
    }

  private:
    struct Row {
        int64_t length, count, lanes, num_ranges, sees_at;
        std::vector<int64_t> sees_to;  // of each node: after the last node that it sees
    };
    // Lanes are (query head of the group, node) pairs. `partial`: where the result of a unit of one
    // range is put, to be merged later; -1 for a unit of all ranges.
    struct Unit { int64_t b, g, first, last, range, partial; };
    struct Part { float *most, *sum, *values; };  // of some lanes: [lanes], [lanes], [lanes, E]
    struct Scratch { Buffer query, scores, keys, values, part, merged; };
    struct Block { int64_t first, last; };  // lanes of a unit
    struct Span { int64_t from, to, low, high; bool straddles; };  // slots; depths of its nodes

    const Decoder& d;
    const Step& s;
    const int64_t E, group, width;
    const float* qkv;
    float* out;
    std::vector<Row> rows;
    std::vector<int64_t> row_of_node;
    std::vector<Unit> units;
    int64_t merged = 0;  // lanes of units of one range
    std::unique_ptr<float[]> partials;
    std::vector<Scratch> scratch;

    Row row_at(int64_t b, int64_t& at) const {
        Row row{s.lengths[b], s.starts[b + 1] - s.starts[b], 0, 0, at, {}};
        int64_t deepest = 0;
        for (int64_t node = 0; node < row.count; ++node, at += row.count) {
            int64_t to = row.count;
            while (to > 0 && !s.sees[at + to - 1]) --to;
            row.sees_to.push_back(to);
            deepest = std::max(deepest, s.depths[s.starts[b] + node]);
        }
        row.lanes = group * row.count;
        row.num_ranges = (row.length + deepest) / RANGE + 1;
        return row;
    }

    // A unit is all lanes of a key/value head and all ranges, where that keeps all threads busy.
    // Else few lanes are shared by range, many by lane.
    void share_out(int threads) {
        const int64_t heads = s.batch * d.kv_heads, turns = (heads + threads - 1) / threads;
        const bool even = 10 * heads >= 9 * turns * threads;
        int64_t size = 0;
        for (int64_t b = 0; b < s.batch; ++b) {
            const Row& row = rows[b];
            const bool by_range = !even && row.num_ranges > 1 && row.lanes <= MAX_LANES;
            int64_t step = std::min(MAX_LANES, row.lanes);
            while (!even && !by_range && step > LANES && heads * (row.lanes / step) < 4 * threads) step -= LANES;
            for (int64_t g = 0; g < d.kv_heads; ++g)
                for (int64_t range = 0; range < (by_range ? row.num_ranges : 1); ++range)
                    for (int64_t lane = 0; lane < row.lanes; lane += step) {
                        units.push_back({b, g, lane, std::min(lane + step, row.lanes), range, by_range ? size : -1});
                        if (by_range) size += row.lanes * (E + 2);
                    }
            if (by_range) merged += row.lanes * d.kv_heads;
        }
        if (merged) partials.reset(new float[size]);
    }

    int64_t place(int64_t layer, int64_t what, int64_t b, int64_t g) const {
        return (((layer * 2 + what) * s.cache_rows + s.places[b]) * d.kv_heads + g) * s.slots * E;
    }

    Part part_at(float* at, int64_t lanes) const { return {at, at + lanes, at + 2 * lanes}; }

    template <class Done> void compute(const Unit& u, int64_t layer, int64_t window, Scratch& w, Done done) {
        const Row& row = rows[u.b];
        const int64_t lanes = u.last - u.first;
        const float* queries = lay_queries(u, w);
        if (u.partial >= 0) {
            const Part to = part_at(partials.get() + u.partial, lanes);
            std::fill(to.sum, to.sum + lanes, 0.0f);
            return compute_range(u, queries, layer, window, u.range, to, w);
        }
        const Part to = part_at(w.merged.of(lanes * (E + 2)), lanes);
        std::fill(to.sum, to.sum + lanes, 0.0f);
        for (int64_t range = 0; range < row.num_ranges; ++range) compute_range(u, queries, layer, window, range, to, w);
        for (int64_t lane = 0; lane < lanes; ++lane) finish(u, lane, to.values + lane * E, to.sum[lane]);
        report(u, 0, lanes, done);
    }

    // Of blocks, [E][LANES], or [E / 4][QUAD][4] of those of at most four lanes.
    const float* lay_queries(const Unit& u, Scratch& w) const {
        const int64_t lanes = u.last - u.first;
        float* queries = w.query.of((lanes + LANES) * E);
        std::fill(queries, queries + (lanes + LANES) * E, 0.0f);
        for (int64_t first = 0, size; first < lanes; first += size) {
            size = block_size(lanes - first);
            float* to = queries + first * E;
            for (int64_t lane = 0; lane < std::min(size, lanes - first); ++lane) {
                const float* from = qkv + node_of(u, first + lane) * width + head_of(u, first + lane) * E;
                for (int64_t e = 0; e < E; ++e)
                    to[size == QUAD ? (e / 4 * QUAD + lane) * 4 + e % 4 : e * LANES + lane] = from[e];
            }
        }
        return queries;
    }
    int64_t node_of(const Unit& u, int64_t lane) const { return s.starts[u.b] + (u.first + lane) % rows[u.b].count; }
    int64_t head_of(const Unit& u, int64_t lane) const { return u.g * group + (u.first + lane) / rows[u.b].count; }

    // The slots of a range: of the prefix, and of the nodes whose positions are in it.
    Span span_of(const Row& row, int64_t b, int64_t range, int64_t window) const {
        const int64_t start = range * RANGE, low = start - row.length, high = low + RANGE;
        Span span{std::max(start, window ? row.length - window + 1 : 0), std::min(start + RANGE, row.length), low, high, false};
        if (high <= 0) return span;
        int64_t first = row.count, last = 0;
        for (int64_t node = 0; node < row.count; ++node) {
            const int64_t depth = s.depths[s.starts[b] + node];
            if (depth < low || depth >= high) { span.straddles = true; continue; }
            first = std::min(first, node);
            last = node + 1;
        }
        if (low >= 0) span.from = row.length + first;
        span.to = row.length + last;
        return span;
    }

    // Merges what all lanes of the unit get from a range into `to`.
    void compute_range(const Unit& u, const float* queries, int64_t layer, int64_t window, int64_t range, Part to, Scratch& w) {
        const Span span = span_of(rows[u.b], u.b, range, window);
        if (span.from >= span.to) return;
        const float* keys = floats(place(layer, 0, u.b, u.g), span, w.keys);
        const float* values = floats(place(layer, 1, u.b, u.g), span, w.values);
        for (int64_t first = 0, size; first < u.last - u.first; first += size) {
            size = block_size(u.last - u.first - first);
            const Block block{first, std::min(first + size, u.last - u.first)};
            const float* query = queries + first * E;
            if (size == QUAD) compute_block<QUAD>(u, block, query, window, span, keys, values, to, w);
            else compute_block<LANES>(u, block, query, window, span, keys, values, to, w);
        }
    }

    template <int W>
    void compute_block(const Unit& u, Block block, const float* query, int64_t window, Span span, const float* keys,
                       const float* values, Part to, Scratch& w) const {
        int64_t most = rows[u.b].length;  // after the last slot that any of these lanes sees
        for (int64_t lane = block.first; lane < block.last; ++lane)
            most = std::max(most, rows[u.b].length + rows[u.b].sees_to[node_of(u, lane) - s.starts[u.b]]);
        span.to = std::min(span.to, most);
        if (span.from >= span.to) return;
        const int64_t count = span.to - span.from;
        float* scores = w.scores.of(padded(count, 8) * W);
        if constexpr (W == QUAD) score_quads(keys, values, count, query, scores, block.first == 0);
        else score(keys, values, count, query, scores, block.first == 0);
        for (int64_t lane = block.first; lane < block.last; ++lane)
            hide<W>(u, lane, window, span, scores + lane - block.first);
        const Part part = part_at(w.part.of(LANES * (E + 2)), LANES);
        softmax<W>(count, scores, part);
        gather<W>(values, count, block.last - block.first, scores, part);
        for (int64_t lane = block.first; lane < block.last; ++lane) merge(part, lane - block.first, to, lane);
    }

    // Keys or values of the span, expanded where they are in 16 bits.
    const float* floats(int64_t at, const Span& span, Buffer& room) const {
        at += span.from * E;
        if (!s.half_cache) return (const float*)s.cache + at;
        const int64_t size = (span.to - span.from) * E;
        float* to = room.of(size);
        for (int64_t i = 0; i < size; i += LANES) store(to + i, load_half((const uint16_t*)s.cache + at + i));
        return to;
    }

    // scores[slot][lane], some slots at a time: enough sums that do not wait for each other. A score
    // is four sums, of every fourth input. Values, which are read next, are on their way meanwhile.
    void score(const float* keys, const float* values, int64_t count, const float* query, float* scores, bool ahead) const {
#ifdef __AVX512F__
        constexpr int SLOTS = 8;
#else
        constexpr int SLOTS = 4;
#endif
        int64_t at = 0;
        for (; at + SLOTS <= count; at += SLOTS) {
            if (ahead) expect(values + at * E, keys + (RANGE + at) * E, SLOTS);
            score_slots<SLOTS>(keys + at * E, query, scores + at * LANES);
        }
        for (; at < count; ++at) score_slots<1>(keys + at * E, query, scores + at * LANES);
    }
    template <int SLOTS> void score_slots(const float* keys, const float* query, float* scores) const {
        Vec total[SLOTS];
        for (int64_t first = 0; first < 4; ++first) {
            Vec sum[SLOTS];
#pragma GCC unroll 8
            for (int i = 0; i < SLOTS; ++i) sum[i] = splat(0);
            for (int64_t e = first; e < E; e += 4) {
                const Vec q = load(query + e * LANES);
#pragma GCC unroll 8
                for (int i = 0; i < SLOTS; ++i) sum[i] = fma(splat(keys[i * E + e]), q, sum[i]);
            }
#pragma GCC unroll 8
            for (int i = 0; i < SLOTS; ++i) total[i] = first == 0 ? sum[i] : total[i] + sum[i];
        }
#pragma GCC unroll 8
        for (int i = 0; i < SLOTS; ++i) store(scores + i * LANES, total[i] * splat(d.scale));
    }
    void score_quads(const float* keys, const float* values, int64_t count, const float* query, float* scores, bool ahead) const {
        for (int64_t at = 0; at < count; at += 8) {
            const float* key[8];
            for (int i = 0; i < 8; ++i) key[i] = keys + std::min(at + i, count - 1) * E;
            if (ahead) expect(values + at * E, keys + (RANGE + at) * E, 8);
            Vec sum[8];
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) sum[i] = splat(0);
            for (int64_t e = 0; e < E; e += 4) {
                const Vec q = load(query + e * QUAD);
#pragma GCC unroll 8
                for (int i = 0; i < 8; ++i) sum[i] = fma(repeat_quad(key[i] + e), q, sum[i]);
            }
            store(scores + at * QUAD, total_quads(sum[0], sum[1], sum[2], sum[3]) * splat(d.scale));
            store(scores + at * QUAD + LANES, total_quads(sum[4], sum[5], sum[6], sum[7]) * splat(d.scale));
        }
        for (int64_t i = count * QUAD; i < padded(count, 8) * QUAD; ++i) scores[i] = -INFINITY;
    }
    // Values of some slots, and the keys of the next range, will be read soon.
    void expect(const float* values, const float* keys, int64_t slots) const {
        if (s.half_cache) return;
        for (int64_t i = 0; i < slots * E; i += LANES) {
            __builtin_prefetch(values + i, 0, 2);
            __builtin_prefetch(keys + i, 0, 2);
        }
    }

    // Hides what a lane does not see: other branches, positions of other ranges and, in a windowed
    // layer, positions too far back.
    template <int W> void hide(const Unit& u, int64_t lane, int64_t window, const Span& span, float* scores) const {
        const Row& row = rows[u.b];
        const int64_t* depths = s.depths + s.starts[u.b];
        const int64_t node = node_of(u, lane) - s.starts[u.b], first = std::max<int64_t>(span.from - row.length, 0);
        const int64_t others = span.to - row.length, position = row.length + depths[node];
        const uint8_t* sees = s.sees + row.sees_at + node * row.count;
        float* at_root = scores + (row.length - span.from) * W;
        for (int64_t other = first; other < others; ++other) {
            const void* hidden = std::memchr(sees + other, 0, others - other);
            if (!hidden) break;
            other = (const uint8_t*)hidden - sees;
            at_root[other * W] = -INFINITY;
        }
        for (int64_t other = first; span.straddles && other < others; ++other)
            if (depths[other] < span.low || depths[other] >= span.high) at_root[other * W] = -INFINITY;
        if (!window) return;
        for (int64_t other = first; other < others; ++other)
            if (depths[node] - depths[other] >= window) at_root[other * W] = -INFINITY;
        const int64_t too_far = std::min(std::min(row.length, span.to), position - window + 1);
        for (int64_t at = span.from; at < too_far; ++at) scores[(at - span.from) * W] = -INFINITY;
    }

    // In place: exponentials, not yet divided by their sums, exactly 0 where hidden.
    template <int W> static void softmax(int64_t count, float* scores, Part part) {
        Vec most = splat(-INFINITY);
        for (int64_t i = 0; i < count * W; i += LANES) most = vmax(most, load(scores + i));
        if (W == QUAD) most = max_of_quads(most);
        for (int64_t i = 0; i < count * W; i += LANES)
            store(scores + i, keep_where_above(vexp(load(scores + i) - most), load(scores + i), -1e38f));
        store(part.most, most);
    }

    // Weighted sums of values, and of the weights.
    template <int W> void gather(const float* values, int64_t count, int64_t lanes, const float* weights, Part to) const {
        for (int64_t lane = 0; lane < lanes; lane += 4) {
            const Part some{nullptr, to.sum + lane, to.values + lane * E};
            switch (std::min<int64_t>(4, lanes - lane)) {
                case 1: gather_lanes<W, 1>(values, count, weights + lane, some); break;
                case 2: gather_lanes<W, 2>(values, count, weights + lane, some); break;
                case 3: gather_lanes<W, 3>(values, count, weights + lane, some); break;
                default: gather_lanes<W, 4>(values, count, weights + lane, some);
            }
        }
    }
    template <int W, int R> void gather_lanes(const float* values, int64_t count, const float* weights, Part to) const {
        int64_t e = 0;
        for (; e + 4 * LANES <= E; e += 4 * LANES) gather_block<W, R, 4>(values + e, count, weights, to, e);
        for (; e < E; e += LANES) gather_block<W, R, 1>(values + e, count, weights, to, e);
    }
    template <int W, int R, int C>
    void gather_block(const float* values, int64_t count, const float* weights, Part to, int64_t e) const {
        Vec sums[R][C], total[R];
        for (auto& row : sums) for (auto& part : row) part = splat(0);
        for (auto& row : total) row = splat(0);
        for (int64_t at = 0; at < count; ++at) {
            Vec value[C];
            for (int i = 0; i < C; ++i) value[i] = load(values + at * E + i * LANES);
            for (int r = 0; r < R; ++r) {
                const Vec weight = splat(weights[at * W + r]);
                total[r] = total[r] + weight;
                for (int i = 0; i < C; ++i) sums[r][i] = fma(weight, value[i], sums[r][i]);
            }
        }
        float all[LANES];
        for (int r = 0; r < R; ++r) {
            store(all, total[r]);
            to.sum[r] = all[0];
            for (int i = 0; i < C; ++i) store(to.values + r * E + e + i * LANES, sums[r][i]);
        }
    }

    // The next range of a lane: both are scaled to the larger of their maxima.
    void merge(Part part, int64_t lane, Part to, int64_t at) const {
        if (part.sum[lane] == 0) return;  // nothing of it is seen
        const float* values = part.values + lane * E;
        float* merged = to.values + at * E;
        if (to.sum[at] == 0) {
            to.most[at] = part.most[lane];
            to.sum[at] = part.sum[lane];
            std::copy(values, values + E, merged);
            return;
        }
        const float most = std::max(to.most[at], part.most[lane]);
        const Vec old_scale = vexp(splat(to.most[at] - most)), scale = vexp(splat(part.most[lane] - most));
        float sum[LANES];
        store(sum, fma(splat(part.sum[lane]), scale, splat(to.sum[at]) * old_scale));
        to.most[at] = most;
        to.sum[at] = sum[0];
        for (int64_t e = 0; e < E; e += LANES)
            store(merged + e, fma(load(values + e), scale, load(merged + e) * old_scale));
    }

    // Of units of one range, which lie one after another: those of a head in the order of positions.
    // A thread merges about the lanes whose ranges it has computed.
    template <class Done> void merge_ranges(int id, int active, Done done) {
        int64_t before = 0;  // lanes of the units so far
        for (const Unit& u : units) {
            if (u.partial < 0 || u.range != 0) continue;
            const int64_t lanes = u.last - u.first, size = lanes * (E + 2);
            const int64_t first = std::clamp<int64_t>(merged * id / active - before, 0, lanes);
            const int64_t end = std::clamp<int64_t>(merged * (id + 1) / active - before, 0, lanes);
            const Part to = part_at(partials.get() + u.partial, lanes);
            for (int64_t lane = first; lane < end; ++lane) {
                for (int64_t range = 1; range < rows[u.b].num_ranges; ++range)
                    merge(part_at(partials.get() + u.partial + range * size, lanes), lane, to, lane);
                finish(u, lane, to.values + lane * E, to.sum[lane]);
            }
            report(u, first, end, done);
            before += lanes;
        }
    }

    void finish(const Unit& u, int64_t lane, const float* values, float sum) {
        float* to = out + (node_of(u, lane) * d.query_heads + head_of(u, lane)) * E;
        for (int64_t e = 0; e < E; e += LANES) store(to + e, load(values + e) / splat(sum));
    }

    // Of these lanes of a unit, which are finished.
    template <class Done> void report(const Unit& u, int64_t lane, int64_t end, Done done) const {
        for (int64_t count; lane < end; lane += count) {
            const int64_t node = node_of(u, lane);
            count = std::min(s.starts[u.b + 1] - node, end - lane);
            done(node, node + count, head_of(u, lane));
        }
    }
};
