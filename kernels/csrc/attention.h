// Cascade attention: softmax(q k^T) v of every row over the keys of all its levels.
//
// A part of a job is one KV head of a block of rows. It runs in three passes over the levels:
//   1. logits: each request's keys meet all of its rows, 32 keys at a time, transposed in the L1
//      cache so that a lane holds a key; a row's logits are written one after the other in the order
//      of its own path, whichever level its keys come from;
//   2. softmax: the row's largest logit and the sum of its exponentials, over that list;
//   3. values: each request's values are added to all of its rows, key after key.
// A logit is summed over the dimensions in order, a softmax over the row's own list, an output over
// its keys in order (float32 accumulators go from level to level without a rounding). So a row's
// bits depend on its query and its keys alone: not on the other rows, on how its keys are divided
// into levels, on the slots they lie in, or on the number of threads.
#pragma once

#include "amx.h"
#include "int8.h"
#include "native.h"
#include "vector.h"

namespace {

using arbor::AttentionJob;
using arbor::Level;
using arbor::Scratch;

constexpr int WIDTH = Vec::WIDTH;
constexpr int KEYS = 32;        // keys of a transposed tile
// Keys whose values are read again from the L1 cache; only with AVX2 were fewer measured to be better.
constexpr int VALUES = WIDTH == 8 ? 32 : 64;
// Queries that share a tile in registers, and rows that share values: sums and what they read fit.
constexpr int LOGIT_ROWS = WIDTH == 16 ? 8 : WIDTH == 8 ? 6 : 4;
constexpr int VALUE_ROWS = WIDTH == 16 || WIDTH == 8 ? 6 : 5;

// Vectors of 32 keys that meet R queries together, and vectors of a value that are added to R rows:
// fewer where AVX2's 16 registers would not hold the sums of more rows.
constexpr int key_vectors(int queries) { return WIDTH == 16 || (WIDTH == 8 && queries > 2) ? 2 : 4; }
constexpr int value_vectors(int rows) { return WIDTH == 8 && rows > 2 ? 2 : 4; }
constexpr int MOST_DIM = 256;   // as in kernels/native.py
constexpr int MARGIN = KEYS;    // numbers before and after a row's list that a tile may write
constexpr int64_t BLOCK_BYTES = 512 << 10;  // logits of a block of rows; half of a small L2 cache

inline int least(int a, int b) { return a < b ? a : b; }
inline int most(int a, int b) { return a > b ? a : b; }

// Asks for keys or values that are read soon: for L2 where that was measured to be faster, perhaps
// because keys that lie some heads apart share few sets of the L1 cache. Only AVX2 was measured.
inline void fetch_ahead(const char* from, int bytes) {
    for (int b = 0; b < bytes; b += 64) WIDTH == 8 ? prefetch_far(from + b) : prefetch(from + b);
}

// Where the keys of a row are: on one level, keys first .. end of its request.
struct Reads {
    int first, end;
};

inline Reads reads_of(const Level& level, int request, int row, int window) {
    int begin = level.keys[request], end = level.keys[request + 1];
    if (!level.causal) return {begin, end};
    end -= level.rows[request + 1] - 1 - row;
    return {window ? most(begin, end - window) : begin, end};
}

inline int request_of(const Level& level, int row) {
    int low = 0, high = level.requests;  // the last request that begins at or before the row
    while (high - low > 1) {
        int middle = (low + high) / 2;
        (level.rows[middle] <= row ? low : high) = middle;
    }
    return low;
}

inline int count_keys(const AttentionJob& job, int row) {
    int count = 0;
    for (int i = 0; i < job.level_count; i++) {
        Reads reads = reads_of(job.levels[i], request_of(job.levels[i], row), row, job.window);
        count += reads.end - reads.first;
    }
    return count;
}

// Rows of a block, so that their logits fit into the cache; depends on the longest row alone.
inline int block_rows(const AttentionJob& job, int* longest) {
    int count = 0;
    for (int row = 0; row < job.row_count; row++) count = most(count, count_keys(job, row));
    *longest = count;
    int64_t bytes = static_cast<int64_t>(count + 2 * MARGIN) * job.group * 4;
    int rows = static_cast<int>(BLOCK_BYTES / bytes);
    return least(most(rows, 1), job.row_count);
}

// Products of R queries with some of the 32 keys, beginning with key `first`, to each query's list.
template <int R>
void logit_tile(const float* tile, int first, int dim, const float* queries, float* const* to) {
    constexpr int TILE = key_vectors(R);
    Vec acc[R][TILE];
    WRITTEN_OUT for (int r = 0; r < R; r++) {
        WRITTEN_OUT for (int c = 0; c < TILE; c++) acc[r][c] = set1(0.0f);
    }
    for (int d = 0; d < dim; d++) {
        Vec keys[TILE];
        for (int c = 0; c < TILE; c++) keys[c] = load(tile + d * KEYS + first + c * WIDTH);
        for (int r = 0; r < R; r++) {
            Vec query = set1(queries[r * dim + d]);
            for (int c = 0; c < TILE; c++) acc[r][c] = fma(query, keys[c], acc[r][c]);
        }
    }
    WRITTEN_OUT for (int r = 0; r < R; r++) {
        WRITTEN_OUT for (int c = 0; c < TILE; c++) store(to[r] + first + c * WIDTH, acc[r][c]);
    }
}

template <int R>
void logit_rows(
    int rows, const float* tile, int dim, const float* queries, float* const* to) {
    if constexpr (R > 0) {
        if (rows == R) {
            for (int first = 0; first < KEYS; first += key_vectors(R) * WIDTH) {
                logit_tile<R>(tile, first, dim, queries, to);
            }
            return;
        }
        logit_rows<R - 1>(rows, tile, dim, queries, to);
    }
}

// 16 keys of float32 as columns of a tile.
inline void transpose_keys(const float* const* keys, int dim, float* tile) {
    for (int d = 0; d < dim; d += 16) {
        const uint32_t* at[16];
        for (int i = 0; i < 16; i++) at[i] = reinterpret_cast<const uint32_t*>(keys[i] + d);
        transpose(at, reinterpret_cast<uint32_t*>(tile + d * KEYS), KEYS);
    }
}

// Pairs of 16 keys of bfloat16 as columns, 32 dimensions as 16 x 16 numbers, `stride` apart.
inline void transpose_pairs(const bf16* const* keys, int dim, uint32_t* pairs, int stride) {
    for (int d = 0; d < dim; d += 32) {
        int count = least(32, dim - d);
        alignas(64) bf16 padded[16][32];
        const uint32_t* at[16];
        for (int i = 0; i < 16; i++) {
            at[i] = reinterpret_cast<const uint32_t*>(keys[i] + d);
            if (count < 32) {  // a whole vector would read past the head
                std::memcpy(padded[i], keys[i] + d, 32);
                std::memset(padded[i] + 16, 0, 32);
                at[i] = reinterpret_cast<const uint32_t*>(padded[i]);
            }
        }
        transpose(at, pairs + d / 32 * stride, 16);
    }
}

// 16 keys of bfloat16 as columns of a tile: pairs are transposed as one number, then widened.
inline void transpose_keys(const bf16* const* keys, int dim, float* tile) {
    alignas(64) uint32_t pairs[MOST_DIM / 32 * 256];
    transpose_pairs(keys, dim, pairs, 256);
    for (int p = 0; p < dim / 2; p++) {
        for (int c = 0; c < 16; c += WIDTH) {
            store(tile + 2 * p * KEYS + c, even_of(pairs + 16 * p + c));
            store(tile + (2 * p + 1) * KEYS + c, odd_of(pairs + 16 * p + c));
        }
    }
}

// acc[r] += weight[r][key] * value[key], key after key, for R rows and V vectors of a value.
template <int R, int V, class Number>
void value_tile(
    const Number* const* values, int keys, const float* const* weights, float* const* out) {
    Vec acc[R][V];
    for (int r = 0; r < R; r++) {
        for (int c = 0; c < V; c++) acc[r][c] = load(out[r] + c * WIDTH);
    }
    for (int key = 0; key < keys; key++) {
        Vec value[V];
        for (int c = 0; c < V; c++) value[c] = load(values[key] + c * WIDTH);
        for (int r = 0; r < R; r++) {
            Vec weight = set1(weights[r][key]);
            for (int c = 0; c < V; c++) acc[r][c] = fma(weight, value[c], acc[r][c]);
        }
    }
    for (int r = 0; r < R; r++) {
        for (int c = 0; c < V; c++) store(out[r] + c * WIDTH, acc[r][c]);
    }
}

template <int R, int V, class Number>
void value_rows(
    int rows, const Number* const* values, int keys, const float* const* weights,
    float* const* out) {
    if constexpr (R > 0) {
        if (rows == R) return value_tile<R, V, Number>(values, keys, weights, out);
        value_rows<R - 1, V, Number>(rows, values, keys, weights, out);
    }
}

// Queries and results are a Number, what the pool holds is Stored: the same, or the codes and scales
// of 8-bit KV, which are decoded to float32 a tile at a time.
template <class Number, class Stored>
struct Block {
    static constexpr bool CODED = sizeof(Stored) == 1;
#if defined(__AMX_BF16__)
    static constexpr bool TILES = sizeof(Number) == 2 && !CODED;  // logits by the tiles of AMX
#else
    static constexpr bool TILES = false;
#endif
    const AttentionJob& job;
    int head;           // KV head
    int first_row, end_row;
    int stride;         // of a query's list of logits
    float* logits;      // [rows * group][stride]; a list begins MARGIN numbers in
    float* queries;     // [rows * group][dim_qk]; with TILES bf16, dim_qk padded to pairs of 32
    float* sums;        // [rows * group][dim_vo]
    float* totals;      // [rows * group]: 1 / sum of exponentials
    float* tile;        // [dim_qk][KEYS]; with TILES [dim_qk / 32][2] tiles of pairs
    float* values;      // [VALUES][dim_vo]
    float* decoded;     // [KEYS][dim_qk], with CODED
    int* at;            // [rows]: how much of its list a row has from the levels so far
    int* counts;        // [rows]

    int rows() const { return end_row - first_row; }
    float* list(int query) const { return logits + static_cast<int64_t>(query) * stride + MARGIN; }

    void fill_queries() const {
        int group = job.group, dim = job.dim_qk;
        for (int row = first_row; row < end_row; row++) {
            for (int g = 0; g < group; g++) {
                const Number* from = static_cast<const Number*>(job.q) + row * job.q_row +
                                     (head * group + g) * job.q_head;
                int query = (row - first_row) * group + g;
                if (TILES) {
                    int width = (dim + 31) / 32 * 32;
                    bf16* to = reinterpret_cast<bf16*>(queries) + static_cast<int64_t>(query) * width;
                    std::memset(to + dim, 0, sizeof(bf16) * (width - dim));
                    std::memcpy(to, from, sizeof(bf16) * dim);
                    continue;
                }
                float* to = queries + static_cast<int64_t>(query) * dim;
                for (int d = 0; d < dim; d += WIDTH) store(to + d, load(from + d));
            }
        }
    }

    // Calls `visit(level, request, rows of the block)` level after level.
    template <class Visit>
    void each_request(Visit visit) const {
        for (int row = 0; row < rows(); row++) at[row] = 0;
        for (int i = 0; i < job.level_count; i++) {
            const Level& level = job.levels[i];
            int request = request_of(level, first_row);
            for (; request < level.requests && level.rows[request] < end_row; request++) {
                int first = most(level.rows[request], first_row);
                int end = least(level.rows[request + 1], end_row);
                if (level.keys[request] == level.keys[request + 1]) continue;
                visit(i, request, first, end);
                for (int row = first; row < end; row++) {
                    Reads reads = reads_of(level, request, row, job.window);
                    at[row - first_row] += reads.end - reads.first;
                }
            }
        }
        for (int row = 0; row < rows(); row++) counts[row] = at[row];
    }

    const Stored* key_of(int slot) const {
        return static_cast<const Stored*>(job.k) + slot * job.k_slot + head * job.k_head;
    }
    const Stored* value_of(int slot) const {
        return static_cast<const Stored*>(job.v) + slot * job.v_slot + head * job.v_head;
    }
    static int bytes_of(int dim) {
        return CODED ? stored_width(dim) : dim * static_cast<int>(sizeof(Stored));
    }

    void logits_of(int level_index, int request, int first, int end) const {
        const Level& level = job.levels[level_index];
        int begin = reads_of(level, request, first, job.window).first;
        int stop = reads_of(level, request, end - 1, job.window).end;
        int group = job.group, dim = job.dim_qk, queries_here = (end - first) * group;
        for (int key = begin; key < stop; key += KEYS) {
            int some = least(KEYS, stop - key);
            const Stored* keys[KEYS];
            for (int i = 0; i < KEYS; i++) {  // a tile's rest repeats its last key
                keys[i] = key_of(level.slots[key + least(i, some - 1)]);
            }
            int ahead = least(KEYS, stop - key - KEYS);
            for (int i = 0; i < ahead; i++) {
                const char* next = reinterpret_cast<const char*>(key_of(level.slots[key + KEYS + i]));
                fetch_ahead(next, bytes_of(dim));
            }
#if defined(__AMX_BF16__)
            if constexpr (TILES) {
                tile_logits(level, request, first, end, key, some, keys);
                continue;
            }
#endif
            if constexpr (CODED) {
                const float* numbers[KEYS];
                for (int i = 0; i < KEYS; i++) {
                    numbers[i] = decoded + least(i, some - 1) * dim;
                    if (i < some) decode_head(keys[i], dim, decoded + i * dim);
                }
                transpose_keys(numbers, dim, tile);
                if (some > 16) transpose_keys(numbers + 16, dim, tile + 16);
            } else {
                transpose_keys(keys, dim, tile);
                if (some > 16) transpose_keys(keys + 16, dim, tile + 16);
            }
            float* to[LOGIT_ROWS];
            for (int query = 0; query < queries_here; query += LOGIT_ROWS) {
                int together = least(LOGIT_ROWS, queries_here - query);
                bool reads_any = false;
                for (int r = 0; r < together; r++) {
                    int row = first + (query + r) / group;
                    Reads reads = reads_of(level, request, row, job.window);
                    // keys outside what the row reads: into the margin, or past the list's end
                    bool reads_it = reads.first < key + some && key < reads.end;
                    int place = at[row - first_row] + key - reads.first;
                    reads_any |= reads_it;
                    to[r] = reads_it ? list((first - first_row) * group + query + r) + place
                                     : trash();
                }
                if (!reads_any) continue;
                const float* from = queries + ((first - first_row) * group + query) * dim;
                logit_rows<LOGIT_ROWS>(together, tile, dim, from, to);
            }
        }
    }

#if defined(__AMX_BF16__)
    // Products of a request's queries with 32 keys, 32 queries at a time.
    void tile_logits(const Level& level, int request, int first, int end, int key, int some,
                     const bf16* const* keys) const {
        int group = job.group, dim = job.dim_qk, width = (dim + 31) / 32 * 32;
        uint32_t* pairs = reinterpret_cast<uint32_t*>(tile);
        transpose_pairs(keys, dim, pairs, 512);
        if (some > 16) transpose_pairs(keys + 16, dim, pairs + 256, 512);
        int queries_here = (end - first) * group;
        int first_query = (first - first_row) * group;
        const bf16* all = reinterpret_cast<const bf16*>(queries);
        float* products = values;  // [32][KEYS], where rows are stored one by one
        for (int query = 0; query < queries_here; query += 32) {
            int together = least(32, queries_here - query);
            int top_row = first + query / group, last_row = first + (query + together - 1) / group;
            Reads top = reads_of(level, request, top_row, job.window);
            Reads last = reads_of(level, request, last_row, job.window);
            if (last.end <= key || top.first >= key + some) continue;
            bool lower = together > 16;
            clear_sums();
            const bf16* from = all + static_cast<int64_t>(first_query + query) * width;
            for (int d = 0; d < width; d += 32) {
                add_products(from + d, width, lower, pairs + d * 16, pairs + d * 16 + 256);
            }
            store_sums(products, lower);
            for (int r = 0; r < together; r++) {
                int row = first + (query + r) / group;
                Reads reads = reads_of(level, request, row, job.window);
                if (reads.first >= key + some || key >= reads.end) continue;
                float* to = list(first_query + query + r) + at[row - first_row] + key - reads.first;
                for (int c = 0; c < KEYS; c += WIDTH) store(to + c, load(products + r * KEYS + c));
            }
        }
    }
#endif

    float* trash() const { return tile + job.dim_qk * KEYS; }

    // A list of logits becomes its exponentials, with zeros around them.
    void softmax(int row, int g) const {
        int query = (row - first_row) * job.group + g, n = counts[row - first_row];
        int64_t place = static_cast<int64_t>(row) * job.kv_heads * job.group + head * job.group + g;
        float* x = list(query);
        int whole = n / WIDTH * WIDTH, rest = n - whole;
        Vec scaling = set1(job.scaling), cap = set1(job.softcap), part = set1(1.0f / job.softcap);
        Vec tops = set1(-INFINITY);
        for (int i = 0; i < n; i += WIDTH) {
            Vec logit = load(x + i) * scaling;
            if (job.softcap > 0) logit = cap * tanh(logit * part);
            store(x + i, logit);
            if (i < whole) tops = max(tops, logit);
        }
        if (rest) tops = max(tops, load_first(x + whole, rest, -INFINITY));
        float top = job.v == nullptr ? job.lse[place] : largest(tops);
        Vec totals_of = set1(0.0f), less = set1(top);
        for (int i = 0; i < whole; i += WIDTH) {
            Vec weight = exp(load(x + i) - less);
            store(x + i, weight);
            totals_of = totals_of + weight;
        }
        if (rest) {
            Vec weight = exp(load_first(x + whole, rest, -INFINITY) - less);
            store(x + whole, weight);
            totals_of = totals_of + weight;
        }
        for (float* p = x - MARGIN; p < x; p += WIDTH) store(p, set1(0.0f));
        int end = whole + (rest ? WIDTH : 0);
        for (float* p = x + end; p < x + stride - 2 * MARGIN; p += WIDTH) store(p, set1(0.0f));
        for (int i = 0; i < MARGIN; i += WIDTH) store(x + stride - 2 * MARGIN + i, set1(0.0f));
        if (job.v == nullptr) {
            totals[query] = 1.0f;
            return;
        }
        float total = n ? sum(totals_of) : 0.0f;
        float log_total = n ? top + __builtin_logf(total) : -INFINITY;
        float share = n ? 1.0f / total : 0.0f;
        if (job.sinks) {  // one more key, of value 0
            float sink = job.sinks[head * job.group + g];
            float high = log_total > sink ? log_total : sink;
            float both = high;
            if (high > -INFINITY) {
                both += __builtin_logf(__builtin_expf(log_total - high) +
                                       __builtin_expf(sink - high));
            }
            share = n ? __builtin_expf(top - both) : 0.0f;
            log_total = both;
        }
        job.lse[place] = log_total;
        totals[query] = share;
    }

    void values_of(int level_index, int request, int first, int end) const {
        const Level& level = job.levels[level_index];
        int begin = reads_of(level, request, first, job.window).first;
        int stop = reads_of(level, request, end - 1, job.window).end;
        int group = job.group, dim = job.dim_vo, queries_here = (end - first) * group;
        bool widens = CODED || (sizeof(Stored) == 2 && queries_here > VALUE_ROWS);
        for (int key = begin; key < stop; key += VALUES) {
            int some = least(VALUES, stop - key);
            const Stored* at_slots[VALUES];
            const float* widened[VALUES];
            for (int i = 0; i < some; i++) {
                at_slots[i] = value_of(level.slots[key + i]);
                widened[i] = values + i * dim;
            }
            int ahead = least(VALUES, stop - key - VALUES);
            for (int i = 0; i < ahead; i++) {
                const char* next =
                    reinterpret_cast<const char*>(value_of(level.slots[key + VALUES + i]));
                fetch_ahead(next, bytes_of(dim));
            }
            if constexpr (CODED) {
                for (int i = 0; i < some; i++) decode_head(at_slots[i], dim, values + i * dim);
            } else if (widens) {
                for (int i = 0; i < some; i++) {
                    for (int d = 0; d < dim; d += WIDTH) {
                        store(values + i * dim + d, load(at_slots[i] + d));
                    }
                }
            }
            for (int query = 0; query < queries_here; query += VALUE_ROWS) {
                int together = least(VALUE_ROWS, queries_here - query);
                // keys that one of these rows reads
                int from = reads_of(level, request, first + query / group, job.window).first;
                int to = reads_of(level, request, first + (query + together - 1) / group,
                                  job.window).end;
                int low = most(from, key), high = least(to, key + some);
                if (low >= high) continue;
                const float* weights[VALUE_ROWS];
                float* out[VALUE_ROWS];
                for (int r = 0; r < together; r++) {
                    int row = first + (query + r) / group;
                    Reads reads = reads_of(level, request, row, job.window);
                    int number = (first - first_row) * group + query + r;
                    weights[r] = list(number) + at[row - first_row] + low - reads.first;
                    out[r] = sums + static_cast<int64_t>(number) * dim;
                }
                if (widens) {
                    add_values(together, widened + low - key, high - low, weights, out);
                } else if constexpr (!CODED) {
                    add_values(together, at_slots + low - key, high - low, weights, out);
                }
            }
        }
    }

    template <class Value>
    void add_values(int together, const Value* const* from, int keys, const float* const* weights,
                    float* const* out) const {
        const Value* values_at[VALUES];
        float* out_at[VALUE_ROWS];
        int vectors = value_vectors(together);
        for (int d = 0; d < job.dim_vo; d += vectors * WIDTH) {
            for (int i = 0; i < keys; i++) values_at[i] = from[i] + d;
            for (int r = 0; r < together; r++) out_at[r] = out[r] + d;
            int here = least(vectors, (job.dim_vo - d) / WIDTH);
            add_vectors<4>(here, together, values_at, keys, weights, out_at);
        }
    }

    template <int V, class Value>
    static void add_vectors(int vectors, int together, const Value* const* from, int keys,
                            const float* const* weights, float* const* out) {
        if constexpr (V > 0) {
            if (vectors == V) {
                return value_rows<VALUE_ROWS, V, Value>(together, from, keys, weights, out);
            }
            add_vectors<V - 1>(vectors, together, from, keys, weights, out);
        }
    }

    // What each key of the levels receives from the block's rows: sum of exp(logit - lse).
    void add_mass(int level_index, int request, int first, int end) const {
        const Level& level = job.levels[level_index];
        int64_t before = 0, all = 0;  // keys of the levels before this one, and of all
        for (int i = 0; i < job.level_count; i++) {
            int count = job.levels[i].keys[job.levels[i].requests];
            if (i < level_index) before += count;
            all += count;
        }
        float* to = job.mass + head * all + before;
        for (int row = first; row < end; row++) {
            float counted = job.counted ? job.counted[row] : 1.0f;
            if (counted == 0) continue;
            Reads reads = reads_of(level, request, row, job.window);
            for (int g = 0; g < job.group; g++) {
                int query = (row - first_row) * job.group + g;
                float part = totals[query] * counted;
                const float* from = list(query) + at[row - first_row];
                int n = reads.end - reads.first, i = 0;
                Vec share = set1(part);
                for (; i + WIDTH <= n; i += WIDTH) {
                    float* place = to + reads.first + i;
                    store(place, fma(load(from + i), share, load(place)));
                }
                for (; i < n; i++) to[reads.first + i] += from[i] * part;
            }
        }
    }

    // The sums of a query alone, over the values that it reads: with its neighbours those that only
    // they read weigh 0, which is NaN times a value that is not finite.
    void sum_alone(int row, int g) const {
        int query = (row - first_row) * job.group + g, dim = job.dim_vo;
        float* to = sums + static_cast<int64_t>(query) * dim;
        const float* weight = list(query);
        std::memset(to, 0, sizeof(float) * dim);
        for (int i = 0; i < job.level_count; i++) {
            const Level& level = job.levels[i];
            Reads reads = reads_of(level, request_of(level, row), row, job.window);
            for (int key = reads.first; key < reads.end; key++, weight++) {
                const Stored* value = value_of(level.slots[key]);
                if constexpr (CODED) decode_head(value, dim, values);
                for (int d = 0; d < dim; d += WIDTH) {
                    Vec number;
                    if constexpr (CODED) number = load(values + d);
                    else number = load(value + d);
                    store(to + d, fma(set1(*weight), number, load(to + d)));
                }
            }
        }
    }

    // Writes the result of a query; whether its sums are finite.
    bool write_query(int row, int g) const {
        int query = (row - first_row) * job.group + g, dim = job.dim_vo;
        int64_t place = (static_cast<int64_t>(row) * job.kv_heads + head) * job.group + g;
        Number* to = static_cast<Number*>(job.out) + place * dim;
        Vec share = set1(totals[query]), nothing = set1(0.0f);
        for (int d = 0; d < dim; d += WIDTH) {
            Vec number = load(sums + static_cast<int64_t>(query) * dim + d);
            nothing = nothing + (number - number);
            store(to + d, number * share);
        }
        return sum(nothing) == 0.0f;
    }

    void write_out() const {
        for (int row = first_row; row < end_row; row++) {
            for (int g = 0; g < job.group; g++) {
                if (write_query(row, g)) continue;
                sum_alone(row, g);
                write_query(row, g);
            }
        }
    }

    void run() const {
        fill_queries();
        each_request([&](int level, int request, int first, int end) {
            logits_of(level, request, first, end);
        });
        for (int row = first_row; row < end_row; row++) {
            for (int g = 0; g < job.group; g++) softmax(row, g);
        }
        if (job.mass) {
            each_request([&](int level, int request, int first, int end) {
                add_mass(level, request, first, end);
            });
        }
        if (job.v == nullptr) return;
        std::memset(sums, 0, static_cast<size_t>(rows()) * job.group * job.dim_vo * 4);
        each_request([&](int level, int request, int first, int end) {
            values_of(level, request, first, end);
        });
        write_out();
    }
};

// Blocks times heads; with `mass`, one part per head, since blocks of a head add to one place.
int32_t attention_parts(const AttentionJob& job) {
    int longest, rows = block_rows(job, &longest);
    int blocks = (job.row_count + rows - 1) / rows;
    return job.kv_heads * (job.mass ? 1 : blocks);
}

template <class Number, class Stored>
void attend(const AttentionJob& job, int part, Scratch* scratch) {
    int longest, rows = block_rows(job, &longest), group = job.group;
    int blocks = (job.row_count + rows - 1) / rows;
    int stride = (longest + WIDTH - 1) / WIDTH * WIDTH + 2 * MARGIN;
    int64_t queries = static_cast<int64_t>(rows) * group;
    // tiles read rows of queries behind the last one
    int64_t query_numbers = (queries + 32) * job.dim_qk;
    int64_t numbers = queries * (stride + job.dim_vo) + query_numbers + (queries + 15) / 16 * 16 +
                      job.dim_qk * KEYS + KEYS + static_cast<int64_t>(VALUES) * job.dim_vo +
                      2 * static_cast<int64_t>(rows) + KEYS * job.dim_qk;
    float* memory = static_cast<float*>(scratch->take(scratch, numbers * 4));
    Block<Number, Stored> block{job, part % job.kv_heads, 0, 0, stride, memory, nullptr, nullptr,
                                nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
    block.queries = memory + queries * stride;
    block.sums = block.queries + query_numbers;
    block.tile = block.sums + queries * job.dim_vo;
    block.values = block.tile + job.dim_qk * KEYS + KEYS;
    block.totals = block.values + static_cast<int64_t>(VALUES) * job.dim_vo;
    block.at = reinterpret_cast<int*>(block.totals + (queries + 15) / 16 * 16);
    block.counts = block.at + rows;
    block.decoded = reinterpret_cast<float*>(block.counts + rows);
    int first = job.mass ? 0 : part / job.kv_heads, end = job.mass ? blocks : first + 1;
#if defined(__AMX_BF16__)
    if (Block<Number, Stored>::TILES) shape_tiles(32);
#endif
    for (int i = first; i < end; i++) {
        block.first_row = i * rows;
        block.end_row = least(block.first_row + rows, job.row_count);
        block.run();
    }
#if defined(__AMX_BF16__)
    if (Block<Number, Stored>::TILES) release_tiles();
#endif
}

void attention(const AttentionJob& job, int32_t part, Scratch* scratch) {
    bool half = job.number == arbor::BFLOAT16;
    if (job.kv_number == arbor::INT8) {
        if (half) return attend<bf16, int8_t>(job, part, scratch);
        return attend<float, int8_t>(job, part, scratch);
    }
    if (half) return attend<bf16, bf16>(job, part, scratch);
    attend<float, float>(job, part, scratch);
}

}  // namespace
