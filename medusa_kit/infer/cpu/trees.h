// Trees of heads' guesses, for each row by itself: a given tree is filled, or one is grown, best first
// (tree/dynamic.py says in which order).
#pragma once
#include <queue>
#include <tuple>

#include "copying.h"
#include "heads.h"

constexpr int64_t NO_PARENT = -1;  // of a root

struct Fill {  // mirrored in kernels.py; one tree for all rows
    int64_t rows, nodes, one_pass;
    const int64_t *parents, *ranks;  // [nodes]
    const int64_t* roots;            // [rows]
    const float* given;              // [rows, hidden]
    int64_t* tokens;                 // [rows, nodes]
    const Draw* draws;               // [rows, num_draws], as in Guess
    int64_t num_draws;
};

struct Grow {  // mirrored in kernels.py
    int64_t rows, nodes, one_pass;
    int64_t depth, count, beam;  // heads, guesses of each that are considered, nodes of a depth that get children
    const int64_t* roots;        // [rows]
    const float *given, *temperatures;   // [rows, hidden], [depth]
    int64_t* counts;                     // [rows]: nodes of each tree; what lies behind them is not written
    int64_t *tokens, *parents;           // [rows, nodes]
    float* scores;                       // [rows, nodes]: log-probabilities of the paths
    double least_kept, least_asked;      // paths with lower ones are left out, or get no children
    const Draw* draws;                   // [rows, num_draws], as in Guess
    int64_t num_draws;
    const Text* texts;  // [rows], those of length 0 are not copied from; or null
    const double* smoothing;
    int64_t num_smoothing;
};

// Passes of the heads over rows that are named one after the other. Where heads read the path, a run
// is of one head, and each pass after the first head's follows one of the last run.
class Passes {
  public:
    template <class Tree>  // Fill or Grow
    Passes(const Heads& h, const Tree& tree, Pool& p, int threads)
        : h(h), given(tree.given), draws(tree.draws), num_draws(tree.num_draws), p(p), threads(threads) {}

    void begin(int64_t length) {
        path_length = length;
        heads.clear(), sources.clear(), before.clear(), paths.clear();
    }
    // Returns where the path's tokens go, the root's first. `last`: the pass that guessed the last of
    // them; not used of the first head's.
    int64_t* add(int64_t head, int64_t source, int64_t last = 0) {
        heads.push_back(head);
        sources.push_back(source);
        before.push_back(last);
        paths.resize(paths.size() + path_length);
        return paths.data() + paths.size() - path_length;
    }
    // Where no head reads the path: row r of head k is pass k * rows + r.
    void every_head(int64_t count, int64_t rows) {
        begin(0);
        for (int64_t head = 0; head < count; ++head)
            for (int64_t row = 0; row < rows; ++row) add(head, row);
    }
    bool empty() const { return heads.empty(); }

    // `temperatures`: of each head, where scores are wanted.
    void run(int64_t wanted, const float* temperatures = nullptr) {
        count = wanted;
        const int64_t rows = (int64_t)heads.size();
        found_ids.resize(rows * count);
        found_scores.resize(temperatures ? rows * count : 0);
        heat.clear();
        for (int64_t row = 0; temperatures && row < rows; ++row) heat.push_back(temperatures[heads[row]]);
        states.swap(new_states);
        if (h.recurrent) new_states.resize(rows * h.hidden);
        const bool goes_on = h.recurrent && rows && heads[0];
        for (int64_t first = 0; first < rows; first += MAX_ROWS) {
            const Guess guess{std::min<int64_t>(MAX_ROWS, rows - first), path_length, count, heads.data() + first,
                              paths.data() + first * path_length, sources.data() + first, given,
                              temperatures ? heat.data() + first : nullptr, found_ids.data() + first * count,
                              temperatures ? found_scores.data() + first * count : nullptr,
                              goes_on ? states.data() : nullptr, before.data() + first,
                              h.recurrent ? new_states.data() + first * h.hidden : nullptr, draws, num_draws};
            Guessing guessing(h, guess, p, threads);
            p.run([&](int id) { guessing.all(id); }, Pool::BETWEEN_STEPS);
        }
    }
    const int64_t* path(int64_t row) const { return paths.data() + row * path_length; }
    int64_t id(int64_t row, int64_t rank) const { return found_ids[row * count + rank]; }
    float score(int64_t row, int64_t rank) const {
        const float found = found_scores[row * count + rank];
        return found == found ? found : -INFINITY;
    }

  private:
    const Heads& h;
    const float* given;
    const Draw* draws;
    const int64_t num_draws;
    Pool& p;
    const int threads;
    int64_t path_length = 0, count = 0;
    std::vector<int64_t> heads, sources, before, paths, found_ids;
    std::vector<float> heat, found_scores, states, new_states;  // states after the last run, and this one
};

class Filling {
  public:
    Filling(const Fill& f, Passes& passes) : f(f), passes(passes), depths(f.nodes, 0), ranks(f.nodes, 0) {
        for (int64_t node = 1; node < f.nodes; ++node) {
            const int64_t depth = depths[node] = depths[f.parents[node]] + 1;
            ranks[depth] = std::max(ranks[depth], f.ranks[node] + 1);
            deepest = std::max(deepest, depth);
        }
    }
    void all() {
        for (int64_t row = 0; row < f.rows; ++row) token(row, 0) = f.roots[row];
        if (f.one_pass && deepest) return at_once();
        std::vector<int64_t> place;  // of each node that asks, among these
        for (int64_t depth = 1; depth <= deepest; ++depth) place = level(depth, place);
    }

  private:
    const Fill& f;
    Passes& passes;
    std::vector<int64_t> depths, ranks;  // of each node; how many guesses are wanted at each depth
    int64_t deepest = 0;

    int64_t& token(int64_t row, int64_t node) const { return f.tokens[row * f.nodes + node]; }

    void at_once() {
        passes.every_head(deepest, f.rows);
        passes.run(*std::max_element(ranks.begin(), ranks.end()));
        for (int64_t row = 0; row < f.rows; ++row)
            for (int64_t node = 1; node < f.nodes; ++node)
                token(row, node) = passes.id((depths[node] - 1) * f.rows + row, f.ranks[node]);
    }

    // `before`: what this returned of the depth before.
    std::vector<int64_t> level(int64_t depth, const std::vector<int64_t>& before) {
        std::vector<int64_t> asking, place(f.nodes, -1);  // nodes with a child of this depth
        for (int64_t node = 1; node < f.nodes; ++node) {
            const int64_t parent = f.parents[node];
            if (depths[node] != depth || place[parent] >= 0) continue;
            place[parent] = (int64_t)asking.size();
            asking.push_back(parent);
        }
        const int64_t asked = depth == 1 ? 0 : 1 + *std::max_element(before.begin(), before.end());
        passes.begin(depth);
        for (int64_t row = 0; row < f.rows; ++row)
            for (int64_t node : asking) {
                const int64_t last = depth == 1 ? 0 : row * asked + before[f.parents[node]];
                int64_t* path = passes.add(depth - 1, row, last);
                for (int64_t at = depth; at-- > 0; node = f.parents[node]) path[at] = token(row, node);
            }
        passes.run(ranks[depth]);
        for (int64_t row = 0; row < f.rows; ++row)
            for (int64_t node = 1; node < f.nodes; ++node)
                if (depths[node] == depth)
                    token(row, node) = passes.id(row * (int64_t)asking.size() + place[f.parents[node]], f.ranks[node]);
        return place;
    }
};

class Growing {
  public:
    Growing(const Grow& g, Passes& passes) : g(g), passes(passes), copying(g.smoothing, g.num_smoothing) {}

    void all() { g.one_pass ? at_once() : by_depth(); }

  private:
    // A path below the root: its probability's logarithm, its last token, the pass that guessed it, the
    // place of its parent.
    struct Path { float score; int64_t token, pass, parent; };
    struct Node { int64_t token, parent; float score; };
    const Grow& g;
    Passes& passes;
    Copying copying;
    std::vector<Candidate> found;

    bool likely(double score) const { return score >= g.least_kept && score > -INFINITY; }

    // What a head guesses after a path, and what its text adds; likeliest first only without a text.
    const std::vector<Candidate>& guesses(int64_t row, int64_t pass, const int64_t* path, int64_t path_length) {
        found.clear();
        for (int64_t rank = 0; rank < g.count; ++rank) found.push_back({passes.score(pass, rank), passes.id(pass, rank)});
        if (g.texts && g.texts[row].length) copying.blend(g.texts[row], path, path_length, found);
        return found;
    }

    // One pass of the heads, then a heap gives the most probable paths; arithmetic of `best_first`.
    void at_once() {
        passes.every_head(g.depth, g.rows);
        passes.run(g.count, g.temperatures);
        for (int64_t row = 0; row < g.rows; ++row) write(row, best_first(row));
    }

    std::vector<Node> best_first(int64_t row) {
        // Cost of the path, depth, parent, rank, cost of the parent.
        typedef std::tuple<double, int64_t, int64_t, int64_t, double> Next;
        std::priority_queue<Next, std::vector<Next>, std::greater<Next>> heap;
        std::vector<Node> nodes{{g.roots[row], NO_PARENT, 0.0f}};
        std::vector<std::vector<Candidate>> children;  // of each node, likeliest first
        std::vector<int64_t> path(g.depth);
        const auto ask = [&](int64_t node, int64_t depth, double cost) {
            for (int64_t at = depth; at >= 0; node = nodes[node].parent) path[at--] = nodes[node].token;
            children.push_back(guesses(row, depth * g.rows + row, path.data(), depth + 1));
            std::stable_sort(children.back().begin(), children.back().end(), Copying::likelier);
            const double first = -children.back()[0].score;
            heap.emplace(cost + std::max(first, 0.0), depth + 1, (int64_t)children.size() - 1, 0, cost);
        };
        ask(0, 0, 0.0);
        while (!heap.empty() && (int64_t)nodes.size() < g.nodes) {
            const auto [cost, depth, parent, rank, above] = heap.top();
            if (!likely(-cost)) break;
            heap.pop();
            const int64_t node = (int64_t)nodes.size();
            nodes.push_back({children[parent][rank].token, parent, (float)-cost});
            if (rank + 1 < (int64_t)children[parent].size())
                heap.emplace(std::max(above - children[parent][rank + 1].score, cost), depth, parent, rank + 1, above);
            if (depth < g.depth) ask(node, depth, cost);
            else children.emplace_back();
        }
        return nodes;
    }

    // One pass for each depth over the best paths of the last one; then the best of all.
    void by_depth() {
        std::vector<std::vector<Path>> paths(g.rows);
        std::vector<std::vector<int64_t>> asking(g.rows, {NO_PARENT});
        for (int64_t head = 0; head < g.depth; ++head) {
            passes.begin(head + 1);
            for (int64_t row = 0; row < g.rows; ++row)
                for (int64_t at : asking[row]) add(passes.add(head, row, at < 0 ? 0 : paths[row][at].pass), head, row, at, paths[row]);
            if (passes.empty()) break;
            passes.run(g.count, g.temperatures);
            int64_t pass = 0;
            for (int64_t row = 0; row < g.rows; ++row) {
                const size_t before = paths[row].size();
                for (int64_t at : asking[row]) {
                    const float above = at < 0 ? 0.0f : paths[row][at].score;
                    for (const Candidate& one : guesses(row, pass, passes.path(pass), head + 1))
                        paths[row].push_back({above + (float)one.score, one.token, pass, at});
                    ++pass;
                }
                asking[row] = worth_a_child(paths[row], before);
            }
        }
        for (int64_t row = 0; row < g.rows; ++row) write(row, cut(row, paths[row]));
    }

    // The tokens from the root to the path at `at`, as the head reads them.
    void add(int64_t* to, int64_t head, int64_t row, int64_t at, const std::vector<Path>& paths) const {
        for (int64_t place = head; place > 0; at = paths[at].parent) to[place--] = paths[at].token;
        to[0] = g.roots[row];
    }

    // Places of the `wanted` best from `first` on, best first, equal ones in their order.
    static std::vector<int64_t> best_of(const std::vector<Path>& paths, size_t first, int64_t wanted) {
        std::vector<int64_t> order;
        for (size_t at = first; at < paths.size(); ++at) order.push_back((int64_t)at);
        wanted = std::min(wanted, (int64_t)order.size());
        std::partial_sort(order.begin(), order.begin() + wanted, order.end(), [&](int64_t a, int64_t b) {
            return paths[a].score > paths[b].score || (paths[a].score == paths[b].score && a < b);
        });
        order.resize(wanted);
        return order;
    }

    // Those of the last depth (from `first` on) that can still have a child among the best.
    std::vector<int64_t> worth_a_child(const std::vector<Path>& paths, size_t first) const {
        const int64_t room = g.nodes - 2;  // nodes besides the root and the child itself
        std::vector<int64_t> best = best_of(paths, first, std::min(g.beam, room));
        while (!best.empty() && paths[best.back()].score < g.least_asked) best.pop_back();
        if (room <= 0 || room >= (int64_t)paths.size()) return best;
        const float least = paths[best_of(paths, 0, room).back()].score;
        while (!best.empty() && paths[best.back()].score < least) best.pop_back();
        return best;
    }

    std::vector<Node> cut(int64_t row, const std::vector<Path>& paths) const {
        std::vector<Node> nodes{{g.roots[row], NO_PARENT, 0.0f}};
        std::vector<int64_t> node_of(paths.size(), NO_PARENT);
        for (int64_t at : best_of(paths, 0, g.nodes - 1)) {
            if (!likely(paths[at].score)) break;
            node_of[at] = (int64_t)nodes.size();  // parents come first: they are no less probable
            nodes.push_back({paths[at].token, paths[at].parent < 0 ? 0 : node_of[paths[at].parent], paths[at].score});
        }
        return nodes;
    }

    void write(int64_t row, const std::vector<Node>& nodes) const {
        const int64_t first = row * g.nodes;
        g.counts[row] = (int64_t)nodes.size();
        for (size_t node = 0; node < nodes.size(); ++node) {
            g.tokens[first + node] = nodes[node].token;
            g.parents[first + node] = nodes[node].parent;
            g.scores[first + node] = nodes[node].score;
        }
    }
};
