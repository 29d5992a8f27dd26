// The token drawn from a row of logits (sampler.py): the argmax of scores plus Gumbel noise, a
// score being a logit by the temperature, among the tokens that top-k, top-p and min-p leave. What
// cannot win gets no noise, and tokens far below the likeliest are not sorted.
#pragma once
#include <algorithm>
#include <vector>

#include "matmul.h"

struct Draw {  // mirrored in kernels.py
    const float* logits;
    int64_t count;
    const int64_t* ids;   // of the tokens; null: 0, 1 and so on
    float temperature;
    int64_t top_k;        // 0: all
    double top_p, min_p;  // 1 and 0: all
    uint64_t seed;        // of this position in the text
};

// Of what `exponent` makes of numbers, whose count is a multiple of LANES: in one order whatever the number
// of threads; sixteen at a time, added up in double now and then.
template <class Exponent> double sum_of_exponentials(const float* numbers, int64_t count, Exponent exponent) {
    constexpr int64_t FEW = 64 * LANES;
    double sum = 0;
    for (int64_t first = 0; first < count; first += FEW) {
        Vec few = splat(0.0f);
        for (int64_t i = first; i < std::min(first + FEW, count); i += LANES) {
            const Vec x = exponent(load(numbers + i));
            few = few + keep_where_above(vexp(x), x, -1e38f);
        }
        float lanes[LANES];
        store(lanes, few);
        for (float lane : lanes) sum += lane;
    }
    return sum;
}

namespace {

class Drawing {
  public:
    Drawing(const Draw& d, int wanted, std::vector<float>& memory) : d(d), wanted(wanted), scores(memory), best(1, wanted) {}

    // The columns with the highest scores plus noise, and these sums; -INFINITY where there are no more.
    const Best::Found* highest() {
        scale();
        if (!(most > -INFINITY)) return best.of(0);
        if (wanted == 1) take(likeliest);  // often wins, and rules out most others
        if (d.top_k || d.top_p < 1 || d.min_p > 0)
            for (const Scored& one : kept()) take(one.column);
        else
            take_all();
        return best.of(0);
    }

  private:
    struct Scored { float score; int64_t column; };
    static constexpr int64_t BLOCK = 4 * LANES;
    const Draw& d;
    const int wanted;
    std::vector<float>& scores;  // whole blocks
    Best best;
    float most = -INFINITY;
    int64_t likeliest = 0;

    void scale() {
        scores.assign((d.count + BLOCK - 1) / BLOCK * BLOCK, -INFINITY);
        const Vec divisor = splat(d.temperature);
        Vec largest = splat(-INFINITY);
        int64_t i = 0;
        for (; i + LANES <= d.count; i += LANES) store(scores.data() + i, load(d.logits + i) / divisor);
        for (; i < d.count; ++i) scores[i] = d.logits[i] / d.temperature;
        for (i = 0; i < (int64_t)scores.size(); i += LANES) largest = vmax(largest, load(scores.data() + i));
        float lanes[LANES];
        store(lanes, largest);
        most = *std::max_element(lanes, lanes + LANES);
        each_from(most, [&](int64_t column) { likeliest = column; });  // any of them
    }

    // Calls `found` with each column whose score is `floor` or more.
    template <class Found> void each_from(float floor, Found found) const {
        for (int64_t i = 0; i < (int64_t)scores.size(); i += LANES) {
            if (!any_from(load(scores.data() + i), floor)) continue;
            for (int64_t column = i; column < i + LANES; ++column)
                if (scores[column] >= floor) found(column);
        }
    }

    uint64_t bits(int64_t token) const {  // SplitMix64 of seed and token
        uint64_t z = (uint64_t)token * 0x9E3779B97F4A7C15u + d.seed;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        return z ^ (z >> 31);
    }

    void take(int64_t column) {  // u is between 0 and 1, neither included
        const double u = ((double)(int64_t)(bits(d.ids ? d.ids[column] : column) >> 11) + 0.5) * 0x1p-53;
        best.insert(0, scores[column] + (float)-std::log(-std::log(u)), column);
    }

    float rounded_rest(int64_t token) const { return (float)(int32_t)(~bits(token) >> 40); }

    // A column can win only where its u is near enough to 1: its noise has to be above best - score,
    // so 1 - u < 1 - exp(-exp(score - best)) <= exp(score - best), `best` being the lowest sum that is
    // wanted so far.
    void take_all() {
        const Vec unit = splat(0x1p24f);
        const float rounding = 1e-4f + 1e-6f * std::abs(most);  // more than that of a score plus noise
        for (int64_t first = 0; first < d.count; first += BLOCK) {
            float rest[BLOCK];  // 1 - u, rounded down, in units of 2^-24
            const int64_t here = std::min(BLOCK, d.count - first);
            if (d.ids) for (int64_t i = 0; i < here; ++i) rest[i] = rounded_rest(d.ids[first + i]);
            else for (int64_t i = 0; i < BLOCK; ++i) rest[i] = rounded_rest(first + i);
            for (int64_t i = 0; i < here; i += LANES) {
                const Vec ahead = load(scores.data() + first + i) - splat(best.of(0)[wanted - 1].first - rounding);
                const Vec room = vexp(ahead) * unit - load(rest + i);
                if (!any_from(room, 0.0f)) continue;
                float each[LANES];
                store(each, room);
                for (int64_t lane = 0; lane < LANES; ++lane)
                    if (each[lane] >= 0 && scores[first + i + lane] > -INFINITY) take(first + i + lane);
            }
        }
    }

    // What is left by top-k, top-p and min-p, in this order, as by transformers' processors. Of all
    // columns only those are looked at whose score is near enough to the highest.
    std::vector<Scored> kept() const {
        const double all_mass = d.top_k || d.top_p >= 1 ? 0 : mass_of_all();
        std::vector<Scored> found;
        for (float depth = 8;; depth = depth < 60 ? depth * 1.5f : INFINITY) {
            found.clear();
            each_from(std::max(most - depth, -3e38f), [&](int64_t column) { found.push_back({scores[column], column}); });
            const bool all = depth == INFINITY;
            if (d.top_k && !all && (int64_t)found.size() < d.top_k) continue;
            if (d.top_k) cut_to_k(found);
            if (d.top_p < 1) {
                const bool reached = cut_to_p(found, d.top_k ? mass_of(found) : all_mass);
                if (reached || d.top_k || all) break;
            } else if (d.top_k || all || std::exp(-depth) < d.min_p) {
                break;
            }
        }
        const auto unlikely = [&](const Scored& one) { return chance(one.score) < d.min_p; };
        found.erase(std::remove_if(found.begin(), found.end(), unlikely), found.end());
        return found;
    }

    void cut_to_k(std::vector<Scored>& found) const {
        if ((int64_t)found.size() <= d.top_k) return;
        const auto higher = [](const Scored& a, const Scored& b) { return a.score > b.score; };
        std::nth_element(found.begin(), found.begin() + d.top_k - 1, found.end(), higher);
        const float last = found[d.top_k - 1].score;  // all that equal it stay
        const auto lower = [&](const Scored& one) { return one.score < last; };
        found.erase(std::remove_if(found.begin(), found.end(), lower), found.end());
    }

    // Whether the likeliest of `found` reach the share p of `mass`; then only these are left.
    bool cut_to_p(std::vector<Scored>& found, double mass) const {
        const auto before = [](const Scored& a, const Scored& b) {
            return a.score > b.score || (a.score == b.score && a.column > b.column);
        };
        std::sort(found.begin(), found.end(), before);
        double above = 0;
        for (size_t i = 0; i < found.size(); ++i) {
            if (i && above >= d.top_p * mass) {
                found.resize(i);
                return true;
            }
            above += chance(found[i].score);
        }
        return above >= d.top_p * mass;
    }

    double chance(float score) const { return std::exp(score - most); }  // by that of the likeliest

    double mass_of(const std::vector<Scored>& found) const {
        double sum = 0;
        for (const Scored& one : found) sum += chance(one.score);
        return sum;
    }

    double mass_of_all() const {
        return sum_of_exponentials(scores.data(), (int64_t)scores.size(), [&](Vec x) { return x - splat(most); });
    }
};

}  // namespace
