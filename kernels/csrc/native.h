// Jobs of the native kernels: what Python fills in (as ctypes structures, field by field in
// kernels/native.py), and what each instruction set implements.
#pragma once

#include <cstdint>

namespace arbor {

// Raised when a structure changes but not in size, or a packed weight does; as in kernels/native.py.
constexpr int64_t LAYOUT_VERSION = 7;

// Numbers of the pool, the queries, the weights and the results; sums are always in float32. Pools
// can be INT8: codes and scales, see int8.h.
enum Number : int32_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };

// Added to ggml's number of a format: weights in blocks, see blocks.h.
constexpr int32_t BLOCKS = 64;

// One level of a cascade, as `CascadeLevel` in kernels/base.py.
struct Level {
    const int32_t* rows;    // [requests + 1]
    const int32_t* keys;    // [requests + 1]
    const int32_t* slots;   // [keys[requests]]
    int32_t requests;
    int32_t causal;
};

// Attention of one layer. Strides count numbers; the last dimension is contiguous everywhere.
struct AttentionJob {
    const Level* levels;
    int32_t level_count;
    int32_t row_count;
    int32_t kv_heads;
    int32_t group;          // query heads per KV head
    int32_t dim_qk;         // multiples of 16, as dim_vo
    int32_t dim_vo;
    int32_t window;         // 0: none
    int32_t number;         // of q and out
    int32_t kv_number;      // of k and v: the same, or INT8
    float scaling;
    float softcap;          // 0: none
    const void* q;          // [rows, kv_heads * group, dim_qk]
    const void* k;          // [slots, kv_heads, dim_qk], or as wide as stored
    const void* v;          // [slots, kv_heads, dim_vo], likewise; null: mass alone
    int64_t q_row, q_head, k_slot, k_head, v_slot, v_head;
    const float* sinks;     // [kv_heads * group] or null
    void* out;              // [rows, kv_heads * group, dim_vo], contiguous
    float* lse;             // [rows, kv_heads * group]; read where v is null, else written
    float* mass;            // [kv_heads, keys of all levels] zeros, or null
    const float* counted;   // [rows], what a row counts for in mass; null: 1
};

// K or V of one layer, written to slots as 8-bit codes and scales, see int8.h.
struct StoreJob {
    const void* x;          // [rows, heads, dim]
    int8_t* pool;           // [slots, heads, stored width]
    const int64_t* slots;   // [rows]
    int64_t x_row, x_head, pool_slot, pool_head;
    int32_t rows;
    int32_t heads;
    int32_t dim;            // a multiple of 16
    int32_t number;         // of x
};

// out [rows, outputs] = x [rows, inputs] times a packed weight, plus a bias.
struct LinearJob {
    const void* x;
    const void* packed;     // see linear.h
    const float* bias;      // [outputs] or null
    void* out;
    int64_t x_row;          // stride of x
    int64_t out_row;        // stride of out
    int64_t packed_row;     // bytes of an output's weights, if in blocks
    int32_t rows;
    int32_t inputs;
    int32_t outputs;
    int32_t number;         // of x and out
    int32_t packed_number;  // of the weight: the same, or BLOCKS and a format
};

// out [rows, inputs] = some rows of a weight in blocks.
struct DecodeJob {
    const void* packed;
    const int64_t* ids;     // [rows]
    void* out;
    int64_t packed_row;
    int64_t rows;
    int32_t inputs;
    int32_t number;         // of out
    int32_t packed_number;
};

// RMS norm: out = x / sqrt(mean(x^2) + eps) * (weight + offset).
struct NormJob {
    const void* x;
    const void* weight;
    void* out;
    int64_t x_row;
    int32_t rows;
    int32_t width;
    int32_t number;
    int32_t rounds_first;   // the normalised row is rounded before it is weighted
    float eps;
    float offset;
};

// out = activation(gate) * up, both factors rounded to their dtype.
struct GatedJob {
    const void* gate;
    const void* up;
    void* out;
    int64_t gate_row, up_row;
    int32_t rows;
    int32_t width;
    int32_t number;
    int32_t activation;     // 0: SiLU, 1: GELU (tanh)
};

// y = y + x * factor, product and sum rounded to their dtype: a residual sum.
struct AddJob {
    const void* x;
    void* y;
    int64_t count;
    int32_t number;
    float factor;
};

// The norms of parts of rows, in place: those of the heads of a row, one after the other.
struct HeadNormJob {
    NormJob heads;          // of row 0; x and out are equal, x_row is the width
    int64_t row;            // numbers from one row to the next
    int32_t rows;
};

// Rotary embedding of queries and keys, and the write of K and V, see rotary.h. Strides count numbers.
struct RotaryJob {
    const void* q;          // [rows, q_heads, dim_qk]
    const void* k;          // [rows, kv_heads, dim_qk]
    const void* v;          // [rows, kv_heads, dim_vo], or null: K alone is written
    const void* cos;        // [rows, rotated], or half as wide where a pair has one angle
    const void* sin;
    void* q_out;            // [rows, q_heads, dim_qk], contiguous
    void* k_out;            // [slots, kv_heads, dim_qk]
    void* v_out;            // [slots, kv_heads, dim_vo]
    const int64_t* slots;   // [rows]; null: row r is written to place r
    int64_t q_row, q_head, k_row, k_head, v_row, v_head, cos_row, sin_row;
    int64_t k_out_slot, k_out_head, v_out_slot, v_out_head;
    int32_t rows;
    int32_t q_heads;
    int32_t kv_heads;
    int32_t dim_qk;         // at most 256
    int32_t dim_vo;
    int32_t rotated;        // numbers of a head that are rotated, the first ones; even, 0: none
    int32_t interleaved;    // a pair is two neighbours, else number i of either half
    int32_t one_angle;      // both numbers of pair i use number i of the tables, else their own
    int32_t rounds_products;  // products are rounded to `number` before they are added
    int32_t number;         // of q, k, v and the results
    int32_t table_number;   // of cos and sin
};

// Which tokens each KV head gives up, and what moves, see head_select.h.
struct HeadSelectJob {
    enum Guard : uint8_t { NONE, LAST, FIRST };  // by its score; after all others; before them
    const float* scores;    // [heads, tokens], block after block; `row` apart
    const uint8_t* guard;   // [tokens]
    const int64_t* sizes;   // [blocks], summing to tokens
    const int64_t* lose;    // [blocks], 1 to size
    uint64_t* gone;         // [heads, words], written: a bit for each token
    uint64_t* left;         // [words], likewise: the slots that leave
    uint8_t* leaving;       // [tokens], the same as bytes
    int64_t* moved;         // how many moves there are
    int32_t* head;          // [moved] each, written by `list_moves`
    int32_t* source;
    int32_t* target;
    int64_t row;
    int32_t heads;
    int32_t tokens;
    int32_t blocks;
    int32_t words;          // 64 tokens each
};

// What stays in the cells of KV heads that keep different numbers of tokens, and what moves, see
// head_share.h.
struct HeadShareJob {
    const float* scores;    // [heads, tokens], block after block; `row` apart
    const uint8_t* guard;   // [tokens], `HeadSelectJob::Guard`
    const void* holders;    // [heads, tokens], int16 or int32, whose token lies in each cell;
                            // null: its own
    const int64_t* sizes;   // [blocks], summing to tokens
    const int64_t* lose;    // [blocks], slots, 0 to size
    const int64_t* counts;  // [heads, blocks], the best tokens that each head keeps in any case
    int64_t* held;          // [heads, blocks], tokens that each head holds; written by `count_held`
    uint32_t* keys;         // [heads, 64 words + 16], room to work in
    uint32_t* listed;       // likewise, for the keys of a block: with holders all, else a layer's;
                            // and 16 more
    uint32_t* rest;         // likewise, for the most keys of a head or, if heads compete, a layer
    uint64_t* gone;         // [heads, words], written: a bit for each cell
    uint64_t* left;         // [words], likewise: the slots that leave
    uint8_t* leaving;       // [tokens], the same as bytes
    int64_t* moved;         // how many moves there are
    int32_t* cell;          // [moved + 8] each, written by `list_shared`
    int32_t* source;
    int32_t* into;
    int32_t* target;
    int64_t row;
    int32_t heads;
    int32_t tokens;
    int32_t blocks;
    int32_t words;          // 64 tokens each
    int32_t layers;         // of equally many neighbouring heads
    int32_t pools;          // of neighbouring heads that share their cells, equally many in each
    int32_t competes;       // the heads of a layer compete for what `counts` leaves
    int32_t wide;           // holders are int32
};

// The next token of each row of logits, see choose.h.
struct ChoiceJob {
    const void* logits;     // [rows, vocabulary], `row` apart
    const double* numbers;  // [rows] in [0, 1)
    double* out;            // [5, rows]: token, logarithm of its probability, largest probability,
                            // place of the number within the token's interval, its length;
                            // NaN for the first two probabilities of a row that is not finite
    int64_t row;
    double temperature;     // 0: the most probable token
    double top_p;           // 1: all
    double min_p;           // 0: all
    int32_t top_k;          // 0: all
    int32_t rows;
    int32_t vocabulary;
    int32_t number;         // of logits
};

// What probabilities of each row follow from, see choose.h.
struct LogitSumsJob {
    const void* logits;     // [rows, vocabulary], `row` apart
    double* out;            // [4, rows]: the largest logit, the sum of e^(logit - largest), the
                            // entropy, and the first token with the largest logit
    int64_t row;
    int32_t rows;
    int32_t vocabulary;
    int32_t number;         // of logits
};

// One of the jobs above, to be done after those before it in a list.
struct Call {
    enum Kind : int32_t { LINEAR, NORM, HEAD_NORM, ROTARY, ATTENTION, GATED, ADD };
    const void* job;
    int32_t kind;
};

// Memory of one thread that grows and stays; every call begins anew.
struct Scratch {
    void* (*take)(Scratch*, int64_t bytes);   // aligned to 64 bytes, not cleared
};

// The kernels of one instruction set. Each call does its part of a job: `part` of `parts`.
// No result depends on `parts`: a number is computed by one part, whichever it is.
struct Kernels {
    const char* name;
    int32_t (*attention_parts)(const AttentionJob&);
    void (*attention)(const AttentionJob&, int32_t part, Scratch*);
    int32_t (*linear_parts)(const LinearJob&);
    void (*linear)(const LinearJob&, int32_t part, int32_t parts, Scratch*);
    void (*decode)(const DecodeJob&);
    void (*norm)(const NormJob&);
    void (*gated)(const GatedJob&);
    void (*store)(const StoreJob&);
    void (*rotary)(const RotaryJob&);
    void (*add)(const AddJob&);
    void (*select_heads)(const HeadSelectJob&, Scratch*);
    void (*list_moves)(const HeadSelectJob&);
    void (*count_held)(const HeadShareJob&);
    void (*share_cells)(const HeadShareJob&, Scratch*);
    void (*list_shared)(const HeadShareJob&, Scratch*);
    void (*choose)(const ChoiceJob&, int32_t row, Scratch*);
    void (*sum_logits)(const LogitSumsJob&, int32_t row, Scratch*);
};

// Those of the machine are defined, each by a source of its own.
extern const Kernels avx2_kernels, avx_vnni_kernels, avx512_kernels, avx512_vnni_kernels,
    avx512_bf16_kernels, amx_kernels;                                                  // x86-64
extern const Kernels neon_kernels, neon_dot_kernels, neon_bf16_kernels;               // aarch64

}  // namespace arbor
