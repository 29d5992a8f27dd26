// The kernels called from several threads at once, for ThreadSanitizer: verify steps of two models,
// guesses of heads and single products, each held to what one thread alone computes.
//
// Exit code 0 where all agree. Weights are random: only who touches what matters here.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "decoder.cpp"

namespace {

constexpr int64_t HIDDEN = 64, MLP = 96, HEADS = 4, KV_HEADS = 2, HEAD = 16, VOCAB = 200, SLOTS = 32;
constexpr int64_t LAYERS = 2, NODES = 5, LENGTH = 7, COLUMNS = 3;
constexpr int CALLERS = 4, ROUNDS = 12, THREADS = 2;

struct Weights {
    std::mt19937 random{1};
    std::vector<std::vector<uint8_t>> packed;
    std::vector<std::vector<float>> plain;

    const float* floats(int64_t count) {
        std::uniform_real_distribution<float> draw(-0.3f, 0.3f);
        plain.emplace_back(count);
        for (float& one : plain.back()) one = draw(random);
        return plain.back().data();
    }
    Matrix matrix(int kind, int64_t outputs, int64_t inputs) {
        const int64_t groups = padded(inputs, group_of(kind)) / group_of(kind);
        const int64_t panels = 2 * (padded(outputs, 2 * LANES) / (2 * LANES));
        packed.emplace_back(panels * groups * bytes_a_group(kind));
        uint8_t* at = packed.back().data();
        std::uniform_real_distribution<float> draw(-0.3f, 0.3f);
        for (int64_t group = 0; group < panels * groups; ++group, at += bytes_a_group(kind)) {
            const int floats = (kind == F32 ? bytes_a_group(kind) : header_bytes(kind)) / 4;
            for (int i = 0; i < floats; ++i) { const float one = draw(random) * 0.1f; std::memcpy(at + 4 * i, &one, 4); }
            for (int i = 4 * floats; i < bytes_a_group(kind); ++i) at[i] = (uint8_t)(random() % 64);
        }
        return {kind, outputs, inputs, packed.back().data(), nullptr};
    }
};

struct Model {
    Weights weights;
    std::vector<Layer> layers;
    Decoder decoder;
    Matrix block[1];
    Head head;
    Heads heads;

    explicit Model(int kind) {
        weights.packed.reserve(64);
        weights.plain.reserve(64);
        for (int64_t i = 0; i < LAYERS; ++i)
            layers.push_back({weights.matrix(kind, (HEADS + 2 * KV_HEADS) * HEAD, HIDDEN),
                              weights.matrix(kind, HIDDEN, HEADS * HEAD), weights.matrix(kind, 2 * MLP, HIDDEN),
                              weights.matrix(kind, HIDDEN, MLP), Matrix{}, weights.floats(HIDDEN), nullptr,
                              weights.floats(HIDDEN), nullptr, nullptr, nullptr, 0, 0});
        decoder = {HIDDEN, MLP, HEADS, KV_HEADS, HEAD, HEAD, LAYERS, 0, 1e-5f, 0.25f,
                   layers.data(), weights.floats(HIDDEN), weights.matrix(kind, VOCAB, HIDDEN)};
        block[0] = weights.matrix(F32, HIDDEN, HIDDEN);
        head = {block, 1, 0, weights.matrix(kind, VOCAB, HIDDEN)};
        heads = {HIDDEN, HIDDEN, 1, 1.0f, 0.0f, &head,
                 weights.matrix(F32, VOCAB, HIDDEN), nullptr};
    }

    // A step, the heads and one product: all numbers that came out.
    std::vector<float> answer(int threads) const {
        std::vector<float> embeddings(NODES * HIDDEN), rotary(2 * NODES * HEAD, 0.5f), hidden(NODES * HIDDEN);
        std::vector<float> cache(LAYERS * 2 * KV_HEADS * SLOTS * HEAD, 0.1f), logits(NODES * VOCAB), product(NODES * VOCAB);
        for (size_t i = 0; i < embeddings.size(); ++i) embeddings[i] = 0.01f * (float)(i % 37);
        std::vector<int64_t> starts{0, NODES}, places{0}, lengths{LENGTH}, depths{0, 1, 1, 2, 2}, positions{0, 1, 2, 3, 4}, kept{0, 1, 2, 3, 4}, likeliest(NODES * COLUMNS);
        std::vector<uint8_t> sees{1,0,0,0,0, 1,1,0,0,0, 1,0,1,0,0, 1,1,0,1,0, 1,0,1,0,1};
        const Step step{1, NODES, 1, SLOTS, embeddings.data(), rotary.data(), NODES, positions.data(), starts.data(), places.data(),
                        lengths.data(), depths.data(), sees.data(), cache.data(), NODES, kept.data(), hidden.data(), logits.data(), COLUMNS,
                        likeliest.data(), 0};
        mk_step(&decoder, &step, threads);
        // The end of a prompt alone.
        std::vector<float> end_hidden(HIDDEN), end_logits(VOCAB);
        std::vector<uint8_t> before(NODES * NODES);
        for (int64_t i = 0; i < NODES * NODES; ++i) before[i] = i % NODES <= i / NODES;
        Step prompt = step;
        prompt.depths = positions.data();
        prompt.sees = before.data();
        prompt.num_kept = 1;
        prompt.kept = &kept[NODES - 1];
        prompt.hidden_out = end_hidden.data(), prompt.logits = end_logits.data();
        std::vector<int64_t> end_likeliest(COLUMNS);
        prompt.likeliest = end_likeliest.data();
        mk_step(&decoder, &prompt, threads);
        std::vector<int64_t> head_of_row(NODES, 0), ids(NODES * COLUMNS);
        const std::vector<int64_t> given{0, 1, 2, 3, 4}, given_parents{-1, 0, 0}, given_ranks{0, 0, 1};
        std::vector<float> temperatures(NODES, 1.0f), scores(NODES * COLUMNS);
        const Guess guess{NODES, 0, COLUMNS, head_of_row.data(), nullptr, given.data(), hidden.data(), temperatures.data(),
                          ids.data(), scores.data()};
        mk_guess(&heads, &guess, threads);
        std::vector<int64_t> filled(NODES * 3), counts(NODES), grown(NODES * 3), parents(NODES * 3);
        std::vector<float> grown_scores(NODES * 3);
        const Fill fill{NODES, 3, 0, given_parents.data(), given_ranks.data(), given.data(), hidden.data(), filled.data()};
        mk_fill(&heads, &fill, threads);
        const Grow grow{NODES, 3, 0, 1, COLUMNS, 2, given.data(), hidden.data(), temperatures.data(), counts.data(),
                        grown.data(), parents.data(), grown_scores.data(), -INFINITY, -INFINITY};
        mk_grow(&heads, &grow, threads);
        mk_linear(&decoder.output, hidden.data(), NODES, product.data(), threads);
        for (const auto& more : {logits, scores, product, end_hidden, end_logits}) hidden.insert(hidden.end(), more.begin(), more.end());
        hidden.insert(hidden.end(), likeliest.begin(), likeliest.end());
        for (const auto& more : {ids, filled, counts, grown, parents}) hidden.insert(hidden.end(), more.begin(), more.end());
        return hidden;
    }
};

}  // namespace

int main() {
    const Model models[] = {Model(F32), Model(INT8)};
    const std::vector<float> alone[] = {models[0].answer(1), models[1].answer(1)};
    std::atomic<int> wrong{0};
    std::vector<std::thread> callers;
    for (int caller = 0; caller < CALLERS; ++caller)
        callers.emplace_back([&, caller] {
            for (int round = 0; round < ROUNDS; ++round) {
                const int which = (caller + round) % 2;
                const auto found = models[which].answer(1 + (caller + round / 2) % THREADS);
                if (std::memcmp(found.data(), alone[which].data(), found.size() * sizeof(float))) ++wrong;
            }
        });
    for (auto& caller : callers) caller.join();
    std::printf("%d of %d answers wrong\n", wrong.load(), CALLERS * ROUNDS);
    return wrong != 0;
}
