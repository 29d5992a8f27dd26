// The speed of llama.cpp, or of ik_llama.cpp, by its library alone: no server, no text.
//
//   g++ -O3 -I SOURCE/include -I SOURCE/ggml/include benchmarks/peer_speed.cpp -o peer_speed \
//       -L BUILD_OF_LLAMA -L BUILD_OF_GGML -lllama -lggml -Wl,-rpath,...   (ik: -DIK)
//   peer_speed FILE.gguf THREADS
//
// Says how many seconds it took to read one token, loading included. Then answers each line of stdin with seconds:
//   prompt N            reads N tokens and chooses the next
//   decode DEPTH N ROWS makes N tokens behind DEPTH others in ROWS sequences at once: of one step
//   step DEPTH N        scores N tokens of one sequence behind DEPTH others, logits of all
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "llama.h"

static llama_model *model;
static llama_context *context;
static int vocabulary, largest, threads;

static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Token {
    int id, position, row;
    bool wants_logits;
};

// Runs them in batches of the largest size; then the likeliest token of each that wants logits.
static std::vector<int> run(const std::vector<Token> &tokens) {
    std::vector<int> chosen;
    llama_batch batch = llama_batch_init(largest, 0, 1);
    for (size_t first = 0; first < tokens.size(); first += largest) {
        batch.n_tokens = std::min<size_t>(largest, tokens.size() - first);
        for (int i = 0; i < batch.n_tokens; ++i) {
            const Token &token = tokens[first + i];
            batch.token[i] = token.id;
            batch.pos[i] = token.position;
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = token.row;
            batch.logits[i] = token.wants_logits;
        }
        if (llama_decode(context, batch) != 0) { std::puts("failed"); std::exit(1); }
        for (int i = 0; i < batch.n_tokens; ++i) {
            if (!batch.logits[i]) continue;
            const float *logits = llama_get_logits_ith(context, i);
            int best = 0;
            for (int v = 1; v < vocabulary; ++v) if (logits[v] > logits[best]) best = v;
            chosen.push_back(best);
        }
    }
    llama_batch_free(batch);
    return chosen;
}

static std::vector<Token> text(int count, int position, int row, bool all) {
    static std::mt19937 random(0);
    std::vector<Token> tokens;
    for (int i = 0; i < count; ++i) {
        tokens.push_back({int(random() % vocabulary), position + i, row, all || i == count - 1});
    }
    return tokens;
}

// A context for so many sequences of so many tokens, after one token without a stopwatch.
static void begin(int rows, int tokens) {
    if (context) llama_free(context);
    llama_context_params params = llama_context_default_params();
    params.n_threads = params.n_threads_batch = threads;
    params.n_seq_max = rows;
    params.n_ctx = rows * ((tokens + 256) / 256 * 256);
#ifdef IK
    params.flash_attn = rows == 1;  // as its server has it; with several sequences it fails (GGML_ASSERT(S > 0))
#endif
    context = llama_init_from_model(model, params);
    if (!context) std::exit(1);
    largest = params.n_batch;
    run({{0, 0, 0, true}});
#ifdef IK
    llama_kv_cache_clear(context);
#else
    llama_memory_clear(llama_get_memory(context), true);
#endif
}

static double prompt(int count) {
    begin(1, count);
    const double start = now();
    run(text(count, 0, 0, false));
    return now() - start;
}

static double decode(int depth, int count, int rows) {
    begin(rows, depth + count);
    std::vector<int> chosen;
    for (int row = 0; row < rows; ++row) chosen.push_back(run(text(depth, 0, row, false))[0]);
    const double start = now();
    for (int step = 0; step < count; ++step) {
        std::vector<Token> tokens;
        for (int row = 0; row < rows; ++row) tokens.push_back({chosen[row], depth + step, row, true});
        chosen = run(tokens);
    }
    return (now() - start) / count;
}

static double step(int depth, int count) {
    begin(1, depth + count);
    run(text(depth, 0, 0, false));
    const std::vector<Token> tokens = text(count, depth, 0, true);
    const double start = now();
    run(tokens);
    return now() - start;
}

int main(int, char **arguments) {
    const double start = now();
    llama_backend_init();
    llama_model_params params = llama_model_default_params();
#ifdef IK
    params.repack_tensors = true;  // its fastest, as with -rtr: weights in its own order, in memory of their own
    params.use_mmap = false;
#endif
    model = llama_model_load_from_file(arguments[1], params);
    if (!model) return 1;
    threads = std::atoi(arguments[2]);
#ifdef IK
    vocabulary = llama_n_vocab(model);
#else
    vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
#endif
    prompt(1);
    std::printf("%.9f\n", now() - start);
    std::fflush(stdout);
    char line[256], what[32];
    while (std::fgets(line, sizeof line, stdin)) {
        int a = 0, b = 0, c = 1;
        std::sscanf(line, "%31s %d %d %d", what, &a, &b, &c);
        const double seconds = !std::strcmp(what, "prompt") ? prompt(a)
                             : !std::strcmp(what, "decode") ? decode(a, b, c) : step(a, b);
        std::printf("%.9f\n", seconds);
        std::fflush(stdout);
    }
}
