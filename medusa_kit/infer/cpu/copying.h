// What followed the last tokens of a path where they stand earlier in the row's own text, and the
// guesses of a head blended with it: drafters/heads/copying.py says how and why.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

struct Text {  // mirrored in kernels.py: of a row, its root last
    const int64_t* tokens;
    int64_t length;
};

struct Candidate { double score; int64_t token; };  // a guess with its log-probability

class Copying {
    static constexpr int64_t LONGEST = 8;  // as in tree/dynamic.py, the others as in copying.py
    static constexpr size_t MAX_MATCHES = 512;

  public:
    Copying(const double* smoothing, int64_t longest) : smoothing(smoothing), longest(std::min(longest, LONGEST)) {}

    // `found`: a head's guesses after the path, which begins with the root, likeliest first. They get
    // their blended chances, and after them come the likeliest followers that are not among them, as many
    // at most.
    void blend(const Text& text, const int64_t* path, int64_t path_length, std::vector<Candidate>& found) {
        find(text, path, path_length);
        if (followers.empty()) return;
        for (Candidate& one : found) {
            auto at = std::lower_bound(followers.begin(), followers.end(), one.token,
                                       [](const Follower& f, int64_t token) { return f.token < token; });
            const bool follows = at != followers.end() && at->token == one.token;
            if (follows) at->named = true;
            one.score = blended(std::exp(one.score), follows ? *at : Follower{});
        }
        const size_t guesses = found.size();
        for (const Follower& one : followers)
            if (!one.named) found.push_back({blended(0.0, one), one.token});
        std::stable_sort(found.begin() + guesses, found.end(), likelier);
        found.resize(std::min(found.size(), 2 * guesses));
    }
    static bool likelier(const Candidate& a, const Candidate& b) { return a.score > b.score; }

  private:
    struct Follower {
        int64_t token = 0, times[LONGEST] = {};  // how often after matches of at least 1, 2, .. tokens
        bool named = false;                      // by the head
    };
    const double* smoothing;
    const int64_t longest;
    std::vector<std::pair<int64_t, int64_t>> seen;  // token, tokens matched before it
    std::vector<Follower> followers;                // by rising token
    int64_t times[LONGEST], kinds[LONGEST];         // occurrences that were followed by a token, different ones

    void find(const Text& text, const int64_t* path, int64_t path_length) {
        const int64_t* tokens = text.tokens;
        const auto from_end = [&](int64_t i) {  // the path's last token is the first from the end
            return i <= path_length ? path[path_length - i] : tokens[text.length - 1 - (i - path_length)];
        };
        const int64_t last = from_end(1), most = std::min(longest, text.length + path_length - 1);
        seen.clear(), followers.clear();
        for (int64_t at = text.length - 2; at >= 0 && seen.size() < MAX_MATCHES; --at) {
            if (tokens[at] != last) continue;
            int64_t matched = 1;
            while (matched < most && matched <= at && tokens[at - matched] == from_end(matched + 1)) ++matched;
            seen.emplace_back(tokens[at + 1], matched);
        }
        std::sort(seen.begin(), seen.end());
        std::fill(times, times + LONGEST, 0), std::fill(kinds, kinds + LONGEST, 0);
        for (const auto& [token, matched] : seen) {
            if (followers.empty() || followers.back().token != token) followers.push_back({token});
            for (int64_t i = 0; i < matched; ++i) {
                ++times[i];
                kinds[i] += followers.back().times[i]++ == 0;
            }
        }
    }
    double blended(double chance, const Follower& one) const {
        for (int64_t i = 0; i < longest && times[i]; ++i) {
            const double weight = (double)kinds[i] * smoothing[i];
            chance = ((double)one.times[i] + weight * chance) / ((double)times[i] + weight);
        }
        return std::min(std::log(chance), 0.0);
    }
};
