// Linear layers over weights in blocks (blocks.h), which stay in their file's layout.
//
// The weights of some outputs are decoded into a cache and met there by all rows: in bfloat16 where
// the CPU multiplies pairs of it and x is bfloat16, else in float32. Each result is summed over its
// inputs in Vec::WIDTH lanes, and the lanes in one order: a row's bits do not depend on the other
// rows or on the number of threads.
#pragma once

#include "blocks.h"
#include "linear.h"

namespace {

constexpr int TOGETHER = 4;      // outputs whose sums stay in registers
constexpr int DECODED = 16;      // outputs decoded at a time for many rows, a part of a job
constexpr int MOST_DECODED = 2048;  // inputs of them
constexpr int BLOCK_ROWS = 128;  // that meet all weights, so that x stays in the L2 cache

// float32: WIDTH inputs at a time.
struct SingleLanes {
    using X = float;
    static constexpr int STEP = Vec::WIDTH, ROWS = Vec::WIDTH == 8 ? 2 : 5;
    struct Part {
        Vec v;
    };
    static Part part(const float* p) { return {load(p)}; }
    static Vec add(Vec sum, Part x, Part weight) { return fma(x.v, weight.v, sum); }
};

#if defined(__AVX512BF16__)

// bfloat16: 32 inputs at a time, two in each lane.
struct PairLanes {
    using X = bf16;
    static constexpr int STEP = 32, ROWS = 6;
    struct Part {
        __m512bh v;
    };
    static Part part(const bf16* p) { return {reinterpret_cast<__m512bh>(_mm512_loadu_si512(p))}; }
    static Vec add(Vec sum, Part x, Part weight) {
        return {_mm512_dpbf16_ps(sum.v, x.v, weight.v)};
    }
};

#else

using PairLanes = SingleLanes;

#endif

// The sums of the lanes of four vectors, in the order of `sum`.
inline void sum_of_four(const float* from, float* to) {
#if defined(__AVX512F__)
    __m512 a = _mm512_loadu_ps(from), b = _mm512_loadu_ps(from + 16), c = _mm512_loadu_ps(from + 32),
           d = _mm512_loadu_ps(from + 48);
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    __m256 eight = halves_sum({_mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high))});
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1)));
#else
    for (int i = 0; i < 4; i++) to[i] = sum(load(from + i * Vec::WIDTH));
#endif
}

// R rows of x by `TOGETHER` decoded outputs, over some inputs; the sums begin at zero or go on.
template <class Lanes, int R>
inline void lanes_tile(const typename Lanes::X* x, int64_t x_row, const typename Lanes::X* weights,
                       int inputs, bool begins, float* sums, int64_t sums_row) {
    Vec acc[R][TOGETHER];
    const typename Lanes::X *x_at[R], *weight_at[TOGETHER];
    for (int p = 0; p < TOGETHER; p++) weight_at[p] = weights + p * inputs;
    for (int r = 0; r < R; r++) {
        x_at[r] = x + r * x_row;
        for (int p = 0; p < TOGETHER; p++) {
            acc[r][p] = begins ? set1(0.0f) : load(sums + r * sums_row + p * Vec::WIDTH);
        }
    }
    for (int i = 0; i < inputs; i += Lanes::STEP) {
        typename Lanes::Part weight[TOGETHER];
        for (int p = 0; p < TOGETHER; p++) weight[p] = Lanes::part(weight_at[p] + i);
        for (int r = 0; r < R; r++) {
            typename Lanes::Part factor = Lanes::part(x_at[r] + i);
            for (int p = 0; p < TOGETHER; p++) acc[r][p] = Lanes::add(acc[r][p], factor, weight[p]);
        }
    }
    for (int r = 0; r < R; r++) {
        for (int p = 0; p < TOGETHER; p++) store(sums + r * sums_row + p * Vec::WIDTH, acc[r][p]);
    }
}

template <class Lanes, int R>
inline void lanes_rows(int rows, const typename Lanes::X* x, int64_t x_row,
                       const typename Lanes::X* weights, int inputs, bool begins, float* sums,
                       int64_t sums_row) {
    if constexpr (R > 0) {
        if (rows == R) return lanes_tile<Lanes, R>(x, x_row, weights, inputs, begins, sums, sums_row);
        lanes_rows<Lanes, R - 1>(rows, x, x_row, weights, inputs, begins, sums, sums_row);
    }
}

template <class Number>
void block_results(const LinearJob& job, const float* sums, int64_t sums_row, int first_row, int rows,
                   int first, int count) {
    for (int r = 0; r < rows; r++) {
        float found[DECODED];
        for (int o = 0; o < count; o += 4) {
            sum_of_four(sums + r * sums_row + o * Vec::WIDTH, found + o);
        }
        Number* to = static_cast<Number*>(job.out) + (first_row + r) * job.out_row + first;
        for (int o = 0; o < count; o += Vec::WIDTH) {
            int here = count - o < Vec::WIDTH ? count - o : Vec::WIDTH;
            Vec value = load_first(found + o, here, 0.0f);
            if (job.bias) value = value + load_first(job.bias + first + o, here, 0.0f);
            store_first(to + o, here, value);
        }
    }
}

template <class F, class Lanes, class Number>
void block_groups(const LinearJob& job, int part, int parts, Scratch* scratch) {
    using X = typename Lanes::X;
    // few rows read each output's weights in their order, many keep those of more outputs in L2
    bool few = job.rows <= 2 * Lanes::ROWS;
    int group = few ? TOGETHER : DECODED;
    int blocks = (job.rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    int most_rows = blocks ? (job.rows + blocks - 1) / blocks : 0;
    int most_inputs = job.inputs < MOST_DECODED ? job.inputs : MOST_DECODED;
    int64_t sums_row = group * Vec::WIDTH, sums_bytes = most_rows * sums_row * 4;
    int64_t weight_bytes = static_cast<int64_t>(group) * most_inputs * sizeof(X);
    int64_t x_bytes = static_cast<int64_t>(most_rows) * job.inputs * sizeof(X);
    char* memory = static_cast<char*>(scratch->take(scratch, sums_bytes + weight_bytes + x_bytes));
    float* sums = reinterpret_cast<float*>(memory);
    X* weights = reinterpret_cast<X*>(memory + sums_bytes);
    X* room = reinterpret_cast<X*>(memory + sums_bytes + weight_bytes);
    int groups = (job.outputs + DECODED - 1) / DECODED;
    int first = static_cast<int>(static_cast<int64_t>(groups) * part / parts) * DECODED;
    int end = static_cast<int>(static_cast<int64_t>(groups) * (part + 1) / parts) * DECODED;
    end = end < job.outputs ? end : job.outputs;
    for (int row = 0; row < job.rows; row += most_rows) {
        int rows = job.rows - row < most_rows ? job.rows - row : most_rows;
        int64_t x_row;
        const X* x = rows_of<Number>(job, row, rows, job.inputs, room, &x_row);
        for (int output = first; output < end; output += group) {
            int count = end - output < group ? end - output : group;
            for (int input = 0; input < job.inputs; input += most_inputs) {
                int inputs = job.inputs - input < most_inputs ? job.inputs - input : most_inputs;
                for (int o = 0; o < count; o++) {
                    const uint8_t* from = static_cast<const uint8_t*>(job.packed) +
                                          (output + o) * job.packed_row;
                    decode_blocks<F>(from, input, inputs, weights + static_cast<int64_t>(o) * inputs);
                }
                for (int at = 0; at < rows;) {
                    int tiles = (rows - at + Lanes::ROWS - 1) / Lanes::ROWS;
                    int some = (rows - at + tiles - 1) / tiles;
                    for (int o = 0; o < count; o += TOGETHER) {  // past the last: room, never stored
                        lanes_rows<Lanes, Lanes::ROWS>(
                            some, x + at * x_row + input, x_row,
                            weights + static_cast<int64_t>(o) * inputs, inputs, input == 0,
                            sums + at * sums_row + o * Vec::WIDTH, sums_row);
                    }
                    at += some;
                }
            }
            block_results<Number>(job, sums, sums_row, row, rows, output, count);
        }
    }
}

void block_linear(const LinearJob& job, int32_t part, int32_t parts, Scratch* scratch) {
    with_format(job.packed_number, [&](auto format) {
        using F = decltype(format);
        if (job.number == arbor::FLOAT32) {
            return block_groups<F, SingleLanes, float>(job, part, parts, scratch);
        }
        block_groups<F, PairLanes, bf16>(job, part, parts, scratch);
    });
}

// Rows of a matrix in blocks as float32 or bfloat16.
void decode_rows(const DecodeJob& job) {
    with_format(job.packed_number, [&](auto format) {
        using F = decltype(format);
        for (int64_t i = 0; i < job.rows; i++) {
            const uint8_t* from = static_cast<const uint8_t*>(job.packed) + job.ids[i] * job.packed_row;
            int64_t at = i * job.inputs;
            if (job.number == arbor::FLOAT32) {
                decode_blocks<F>(from, 0, job.inputs, static_cast<float*>(job.out) + at);
            } else {
                decode_blocks<F>(from, 0, job.inputs, static_cast<bf16*>(job.out) + at);
            }
        }
    });
}

void any_linear(const LinearJob& job, int32_t part, int32_t parts, Scratch* scratch) {
    if (job.packed_number >= arbor::BLOCKS) return block_linear(job, part, parts, scratch);
    linear(job, part, parts, scratch);
}

}  // namespace
