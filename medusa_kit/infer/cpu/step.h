// What a step is given: the model, and nodes of B rows of the cache, each after its prefix.
#pragma once
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
    void* cache;                      // [layers][keys, values][cache_rows][G][slots][E]
    int64_t num_kept;                 // nodes whose hidden states and logits are wanted
    const int64_t* kept;
    float *hidden_out, *logits;       // [kept, hidden], [kept, V]; null where logits are not wanted
    int64_t num_likeliest;            // how many next tokens are wanted for each kept row
    int64_t* likeliest;               // [kept, num_likeliest], likeliest first
    int64_t half_cache;               // whether keys and values are in 16 bits
    int64_t num_watched;              // layers whose outputs are wanted, of all nodes
    const int64_t* watched;
    float* watched_out;               // [N, num_watched, hidden]
};
